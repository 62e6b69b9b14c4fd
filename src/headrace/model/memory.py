"""Keep the C allocator from handing large buffers back to the system after each use (Linux with glibc, CPU runs).

glibc maps every block above 32 MiB anew and unmaps it when it is freed. A training pass allocates gradients and
logits of that size again and again, and the kernel clears every page each time. Measured on SmolLM2-135M (float32,
1 thread, 444 tokens, forward and backward): 4.0 against 4.2 CPU seconds, peak memory unchanged. How much is saved
depends on the order of allocations.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 1 << 30


def keep_large_buffers() -> bool:
    """Reuse freed blocks below 1 GiB within this process. Call once, before the model is loaded.

    Returns False, having done nothing, where the C library has no such setting. What the process holds at its peak
    stays held until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
    return bool(accepted and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
