"""The sender that a run's configuration names (``engine.carrier``)."""

from __future__ import annotations

from pathlib import Path

from headrace.config.carriers import BroadcastCarrierConfig, CarrierConfig, DeltaCarrierConfig, FileCarrierConfig
from headrace.weights.broadcast import BroadcastSender
from headrace.weights.carrier import WeightSender
from headrace.weights.file import DeltaSender, FileSender
from headrace.weights.shared_memory import SharedMemorySender


def make_sender(config: CarrierConfig, default_folder: Path) -> WeightSender:
    """``default_folder``: for carriers through a folder whose ``path`` is not set. Raises a HeadraceError for what this
    process cannot send by."""
    if isinstance(config, FileCarrierConfig):
        return FileSender(config.path or default_folder, keep=config.keep)
    if isinstance(config, DeltaCarrierConfig):
        return DeltaSender(
            config.path or default_folder,
            keep=config.keep,
            anchor_every=config.anchor_every,
            zstd_level=config.zstd_level,
        )
    if isinstance(config, BroadcastCarrierConfig):
        return BroadcastSender(
            backend=config.backend, host=config.host, bucket_bytes=config.bucket_bytes, deadline_s=config.deadline_s
        )
    return SharedMemorySender()
