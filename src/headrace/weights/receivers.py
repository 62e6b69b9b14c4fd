"""The other end of any sender, made in any process from the JSON that the sender says (``sender.receiver``).

Imports a carrier only when it is asked for: an engine's environment may lack what another one needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.weights.carrier import WeightReceiver, WeightUpdateError


def make_receiver(spec: Mapping[str, Any]) -> WeightReceiver:
    """``spec``: ``{"type": ..., ...}``. Raises WeightUpdateError for what this process cannot receive."""
    options = dict(spec)
    kind = options.pop("type")
    if kind == "shared_memory":
        from headrace.weights.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(**options)
    if kind in ("file", "delta"):
        from headrace.weights.delta import check_zstd
        from headrace.weights.store import StoreReceiver

        if kind == "delta":
            check_zstd()
        return StoreReceiver(Path(options["path"]), keeps_base=kind == "delta")
    if kind == "broadcast":
        from headrace.weights.broadcast import BroadcastReceiver

        return BroadcastReceiver(**options)
    if kind == "cuda_ipc":
        from headrace.weights.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(**options)
    raise WeightUpdateError(f"weights cannot come by {kind!r}: this headrace has no carrier of that name")
