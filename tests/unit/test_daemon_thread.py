"""The engine's compute thread: results, errors, and a hang that holds nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

from headrace.daemon_thread import DaemonThread


def test_results_and_errors_reach_the_caller():
    """I19: a call's exception is its caller's, and later calls still run."""

    async def main() -> None:
        thread = DaemonThread("t")
        assert await thread.call(lambda a, b: a + b, 2, 3) == 5
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="SystemExit"):
            await thread.call(sys.exit, 3)
        assert await thread.call(lambda: threading.current_thread().name) == "t"
        thread.stop()

    asyncio.run(main())


def test_initialise_failure_reaches_every_caller():
    """I19: a thread that could not start its work says so to each caller; nobody waits for ever."""

    async def main() -> None:
        thread = DaemonThread("t", lambda: {}["lost"])
        for _ in range(2):
            with pytest.raises(KeyError):
                await thread.call(lambda: 1)

    asyncio.run(main())


def test_thread_count_of_torch_stays_on_the_thread():
    """config.num_threads sets torch's threads for the engine's thread only."""

    async def main() -> None:
        before = torch.get_num_threads()
        thread = DaemonThread("t", lambda: torch.set_num_threads(before + 1))
        assert await thread.call(torch.get_num_threads) == before + 1
        assert torch.get_num_threads() == before

    asyncio.run(main())


def test_hung_call_does_not_hold_the_interpreter():
    """I19: a process whose engine thread hangs for ever still ends when its main thread does."""
    code = (
        "import asyncio, threading\n"
        "from headrace.daemon_thread import DaemonThread\n"
        "async def main():\n"
        "    t = DaemonThread('hung')\n"
        "    t.call(threading.Event().wait)\n"
        "    t.stop()\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(main())\n"
        "print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"
