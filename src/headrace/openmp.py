"""Letting go of OpenMP's worker threads when a thread hands its work to another one.

OpenMP keeps a pool of workers for every thread that ever computed in parallel. libgomp, which torch's wheels bring for
Linux, counts the workers of all pools: once they outnumber the cores, none of them spins at a barrier any more, and
each parallel region pays for waking a thread up. A run has three such threads (the loop's, the trainer's, the
engine's) that mostly take turns. Measured on two cores, SmolLM2-135M, 64 rows: a decode step takes 0.19 s while the
loop's thread keeps the worker that it loaded the model with, and 0.14 s once it has let go. Making the workers again
costs less than a millisecond.

Without torch, or with another OpenMP than libgomp, this does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

_SOFT = 1
"""omp_pause_soft (OpenMP 5.0, 3.2.44): give resources back, keep settings such as the number of threads."""


def release_workers() -> bool:
    """End the idle workers of the calling thread's pool; its next parallel region makes them again. Returns whether
    there is a libgomp to ask. Other threads' pools, and results, are not affected."""
    if "torch" not in sys.modules:
        return False
    pause = _pause_function()
    if pause is None:
        return False
    pause(_SOFT)
    return True


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the libgomp that torch has loaded, which may be a copy under another name."""
    if not sys.platform.startswith("linux"):
        return None
    folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
    for name in (*map(str, sorted(folder.glob("libgomp*"))), "libgomp.so.1"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # only what is loaded already
        except OSError:
            continue
        function: Callable[[int], int] | None = getattr(library, "omp_pause_resource_all", None)
        if function is not None:
            return function
    return None
