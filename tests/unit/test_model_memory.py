"""The allocator setting of CPU runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from headrace.model.memory import keep_large_buffers
if {keep}:
    assert keep_large_buffers()
torch.empty(40_000_000).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.empty(40_000_000).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting exists in glibc only")
def test_large_buffers_are_reused() -> None:
    """Without the setting each 160 MB buffer is mapped and cleared anew; with it the pages stay."""
    assert faults(True) < faults(False) / 4
