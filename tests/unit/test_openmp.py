"""Threads that take turns let go of their OpenMP workers, which would otherwise slow down everybody's barriers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.daemon_thread import DaemonThread
from headrace.openmp import release_workers


def num_threads_of_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compute() -> torch.Tensor:
    return (torch.arange(1 << 20, dtype=torch.float32) / 3).sum()


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    release_workers()


@pytest.mark.skipif(not release_workers(), reason="this torch brings no libgomp")
def test_workers_end_and_come_again_with_equal_results():
    """The pool of this thread shrinks by its idle workers; the next parallel sum is the same to the last bit."""
    release_workers()
    base = num_threads_of_process()
    first = compute()
    assert num_threads_of_process() == base + 3
    assert release_workers()
    assert num_threads_of_process() == base
    assert torch.equal(compute(), first)


@pytest.mark.skipif(not release_workers(), reason="this torch brings no libgomp")
def test_a_daemon_thread_keeps_no_workers_and_takes_none_of_its_caller():
    """After a call, neither the caller nor the runner holds a pool that the other's barriers would suffer from."""

    async def main() -> None:
        thread = DaemonThread("worker", lambda: torch.set_num_threads(4))
        await thread.call(int)  # set_num_threads makes threads of its own
        base = num_threads_of_process()
        compute()
        assert torch.isfinite(await thread.call(compute))
        assert num_threads_of_process() == base
        thread.stop()

    asyncio.run(main())


def test_nothing_happens_without_torch():
    """The rooms that import without torch stay without it."""
    code = "import sys; from headrace.openmp import release_workers; assert not release_workers()"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
