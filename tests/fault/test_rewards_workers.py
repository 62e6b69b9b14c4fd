"""Workers that hang, eat memory, die, print and lie; and what is left of them afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.schema import RewardConfig
from headrace.rewards import worker_pool
from headrace.rewards.build import build_rewards
from headrace.rewards.verified import FunctionReward
from headrace.rewards.worker_pool import Probe, RewardStartError, WorkerPool
from headrace.rewards.worker_process import WorkerProcess
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, ScoreResult, Task, Trace, Turn

DEADLINE_S = 1.0

USER_CODE = '''
import asyncio, os, subprocess, sys, time
import headrace.rewards.base as base
from headrace.types import Score

@base.reward(value_range=(0.0, 2.0))
def mine(answer, task, episode):
    assert episode.reply == answer and type(task.metadata["pair"]) is tuple
    return Score(value=2.0 * (answer == task.answer), components={"length": len(answer)})

def behave(reply):
    """Does what the reply says."""
    if reply == "ok": return 1.0
    if reply == "print":
        print("noise on standard output"); sys.stdout.flush(); os.write(1, b'{"id": 1, "score": {"value": 1.0}}\\n')
        os.system("echo noise of a child")
        return 0.5
    if reply == "read": return float(len(sys.stdin.read()) == 0)
    if reply == "sleep":
        while True:
            try: time.sleep(60)
            except BaseException: pass
    if reply == "spin":
        while True:
            try:
                while True: pass
            except BaseException: pass
    if reply == "bomb":
        hoard = []
        while True: hoard.append(bytes(1 << 26))
    if reply == "exit": sys.exit(0)
    if reply == "_exit": os._exit(0)
    if reply == "segfault": os.kill(os.getpid(), 11)
    if reply == "raise": raise ValueError("boom")
    if reply == "daemon":
        code = "import time; time.sleep(300)  # headrace-test-daemon"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        while True: time.sleep(60)
    if reply == "secret": return float("HEADRACE_TEST_SECRET" in os.environ)
    if reply == "hash": return float(hash("a") == HASH)
    return {"true": True, "none": None, "text": "1", "nan": float("nan"), "inf": float("inf"), "big": 1.5}[reply]

HASH = hash("a")

async def later(reply):
    await asyncio.sleep(0)
    return 0.75
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_CODE)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """F138, F139: no zombie, no child, no grandchild after any test of this file."""
    before = children()
    yield
    deadline = time.monotonic() + 5
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not children() - before
    assert not processes_with("headrace-test-daemon")


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(entry.name))
    return found


def episode(reply: str, answer: Any = "ok") -> Episode:
    task = Task(id="t", messages=({"role": "user", "content": "?"},), answer=answer, metadata={"pair": (1, 2)})
    return Episode(key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE)


Work = Callable[[FunctionReward], Awaitable[None]]


def with_reward(reference: str, work: Work, **options: Any) -> None:
    async def run() -> None:
        pool = WorkerPool("mine", {"kind": "function", "reference": reference, "name": "mine"}, **options)
        reward = FunctionReward("mine", pool, DEADLINE_S)
        try:
            await reward.start()
            await work(reward)
        finally:
            await reward.close()
        assert pool.pids == ()

    asyncio.run(run())


def error_of(result: ScoreResult) -> ErrorClass:
    assert isinstance(result, ScoreError), result
    assert result.reward == "mine"
    return result.error_class


def test_user_functions_from_a_file(user_file: Path) -> None:
    """Task and episode arrive as they are (a tuple stays a tuple); the declared range comes back with the worker."""

    async def work(reward: FunctionReward) -> None:
        assert reward.value_range == (0.0, 2.0)
        assert await reward.score(episode("ok")) == Score(value=2.0, components={"length": 2})
        assert await reward.score(episode("other")) == Score(value=0.0, components={"length": 5})

    async def later(reward: FunctionReward) -> None:
        assert await reward.score(episode("")) == Score(value=0.75)

    with_reward(f"{user_file}:mine", work)
    with_reward(f"{user_file}:later", later)


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_hanging_reward_is_killed_in_time_and_the_pool_is_well_again(user_file: Path, how: str) -> None:
    """I15, F118, F140: even a loop that catches everything ends within the deadline plus 1 s; never as a value."""

    async def work(reward: FunctionReward) -> None:
        pids = reward.pool.pids
        started = time.monotonic()
        assert error_of(await reward.score(episode(how))) is ErrorClass.TIMEOUT
        assert time.monotonic() - started < DEADLINE_S + 1
        assert await reward.score(episode("ok")) == Score(value=1.0)
        assert len(reward.pool.pids) == 1 and reward.pool.pids != pids

    with_reward(f"{user_file}:behave", work)


def test_a_deadline_error_names_the_worker(user_file: Path) -> None:
    """I19: the wait has a name."""

    async def work(reward: FunctionReward) -> None:
        result = await reward.score(episode("sleep"))
        assert isinstance(result, ScoreError)
        assert "reward worker mine[0]" in result.message and "1 s" in result.message

    with_reward(f"{user_file}:behave", work)


def test_a_memory_bomb_is_a_classed_error_and_the_pool_is_well_again(user_file: Path) -> None:
    """F121, F144: the cap is the worker's, and the next score is right."""

    async def work(reward: FunctionReward) -> None:
        assert error_of(await reward.score(episode("bomb"))) is ErrorClass.MEMORY
        assert await reward.score(episode("ok")) == Score(value=1.0)

    with_reward(f"{user_file}:behave", work, memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("how", "error_class", "said"),
    [
        ("exit", ErrorClass.CRASH, "exited with status 0 before it answered"),
        ("_exit", ErrorClass.CRASH, "exited with status 0 before it answered"),
        ("segfault", ErrorClass.CRASH, "SIGSEGV"),
        ("raise", ErrorClass.EXCEPTION, "ValueError: boom"),
        ("true", ErrorClass.INVALID_SCORE, "returned True"),
        ("none", ErrorClass.INVALID_SCORE, "returned None"),
        ("text", ErrorClass.INVALID_SCORE, "returned '1'"),
        ("nan", ErrorClass.INVALID_SCORE, "nan"),
        ("inf", ErrorClass.INVALID_SCORE, "inf"),
        ("big", ErrorClass.INVALID_SCORE, "outside of its declared range [0, 1]"),
    ],
)
def test_whatever_else_goes_wrong_is_a_classed_error(
    user_file: Path, how: str, error_class: ErrorClass, said: str
) -> None:
    """I14, F132, F135, F147: an early exit with status 0 is a crash, and no score is guessed."""

    async def work(reward: FunctionReward) -> None:
        result = await reward.score(episode(how))
        assert error_of(result) is error_class
        assert isinstance(result, ScoreError) and said in result.message
        assert await reward.score(episode("ok")) == Score(value=1.0)

    with_reward(f"{user_file}:behave", work)


def test_noise_does_not_corrupt_the_protocol(user_file: Path) -> None:
    """What user code prints, even a forged answer on descriptor 1, is noise; and it finds no input to read."""

    async def work(reward: FunctionReward) -> None:
        for _ in range(3):
            assert await reward.score(episode("print")) == Score(value=0.5)
        assert await reward.score(episode("read")) == Score(value=1.0)

    with_reward(f"{user_file}:behave", work)


def test_workers_inherit_no_secrets(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F142: the environment is an allow-list."""
    monkeypatch.setenv("HEADRACE_TEST_SECRET", "x")

    async def work(reward: FunctionReward) -> None:
        assert await reward.score(episode("secret")) == Score(value=0.0)

    with_reward(f"{user_file}:behave", work)


def test_a_daemon_that_left_its_group_is_killed_too(user_file: Path) -> None:
    """F139: a grandchild in a session of its own does not outlive its worker."""

    async def work(reward: FunctionReward) -> None:
        scoring = asyncio.create_task(reward.score(episode("daemon")))
        while not processes_with("headrace-test-daemon"):
            assert not scoring.done()
            await asyncio.sleep(0.01)
        assert error_of(await scoring) is ErrorClass.TIMEOUT
        assert await reward.score(episode("ok")) == Score(value=1.0)
        assert not processes_with("headrace-test-daemon")

    with_reward(f"{user_file}:behave", work)


def test_many_scores_at_once_each_get_their_own_result(user_file: Path) -> None:
    """F51: fifty at a time, two workers, hanging and crashing ones among them, and nobody gets another's score."""
    replies = ["ok", "print", "raise", "ok", "nan"] * 10
    replies[7] = replies[23] = "sleep"
    replies[11] = "_exit"
    expected = {"ok": 1.0, "print": 0.5, "raise": ErrorClass.EXCEPTION, "nan": ErrorClass.INVALID_SCORE,
                "sleep": ErrorClass.TIMEOUT, "_exit": ErrorClass.CRASH}  # fmt: skip

    async def work(reward: FunctionReward) -> None:
        results = await asyncio.gather(*(reward.score(episode(reply)) for reply in replies))
        got = [result.value if isinstance(result, Score) else result.error_class for result in results]
        assert got == [expected[reply] for reply in replies]
        assert await reward.score(episode("ok")) == Score(value=1.0)

    with_reward(f"{user_file}:behave", work, num_workers=2)


def test_a_cancelled_caller_leaves_no_half_asked_worker(user_file: Path) -> None:
    """A worker whose question was dropped must not give its answer to the next one."""

    async def work(reward: FunctionReward) -> None:
        scoring = asyncio.create_task(reward.score(episode("sleep")))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert await reward.score(episode("print")) == Score(value=0.5)

    with_reward(f"{user_file}:behave", work)


def test_waiting_for_a_worker_has_a_deadline(user_file: Path) -> None:
    """I19, F136: no worker became free: infrastructure, not a wrong answer."""

    async def work(reward: FunctionReward) -> None:
        first = asyncio.create_task(reward.score(episode("sleep")))
        await asyncio.sleep(0.05)
        result = await reward.score(episode("ok"))
        assert error_of(result) is ErrorClass.INFRASTRUCTURE
        assert isinstance(result, ScoreError) and "num_workers" in result.message
        assert error_of(await first) is ErrorClass.TIMEOUT

    with_reward(f"{user_file}:behave", work, queue_deadline_s=0.2)


def test_a_closed_pool_answers_with_an_error(user_file: Path) -> None:
    """I19: who still waits when the reward is closed hears of it."""

    async def work(reward: FunctionReward) -> None:
        waiting = [asyncio.create_task(reward.score(episode("sleep"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await reward.close()
        results = await asyncio.wait_for(asyncio.gather(*waiting), timeout=5)
        assert {error_of(result) for result in results} <= {ErrorClass.CRASH, ErrorClass.INFRASTRUCTURE}

    with_reward(f"{user_file}:behave", work)


def test_a_pool_whose_workers_only_die_gives_up(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F89: a restart budget, then an error that says so, instead of paying for restarts for ever."""
    monkeypatch.setattr(worker_pool, "MAX_CRASHES_IN_A_ROW", 3)

    async def work(reward: FunctionReward) -> None:
        got = [error_of(await reward.score(episode("_exit"))) for _ in range(3)]
        assert got == [ErrorClass.CRASH] * 3
        result = await reward.score(episode("ok"))
        assert error_of(result) is ErrorClass.INFRASTRUCTURE
        assert isinstance(result, ScoreError) and "died 3 times in a row" in result.message

    with_reward(f"{user_file}:behave", work)


PARENT = """
import asyncio, sys
from headrace.rewards.worker_pool import WorkerPool

async def main():
    pool = WorkerPool("mine", {"kind": "function", "reference": sys.argv[1], "name": "mine"}, num_workers=2)
    await pool.start()
    print(*pool.pids, flush=True)
    await asyncio.sleep(120)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_workers_die_with_a_parent_that_was_killed(user_file: Path) -> None:
    """I11: kill -9 of the run leaves no worker behind."""
    command = [sys.executable, "-c", PARENT, f"{user_file}:behave"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---------------------------------------------------------------------------------------------- self-test


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("{file}:nothing", r"cannot load its judge: .*defines no 'nothing'"),
        ("{file}:HASH", r"is a int, not a function"),
        ("no_such_module:f", r"No module named 'no_such_module'"),
        ("nowhere.py:f", r"there is no file"),
    ],
)
def test_a_reward_that_cannot_be_loaded_refuses_to_start(user_file: Path, reference: str, said: str) -> None:
    """F146: a grader that cannot run must not grade."""

    async def nothing(reward: FunctionReward) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardStartError, match=re.compile(said, re.DOTALL)):
        with_reward(reference.format(file=user_file), nothing)


def test_a_verifier_that_judges_wrongly_refuses_to_start() -> None:
    """I15, F119: known inputs must get their known values in every worker, or the run does not begin."""

    async def run() -> None:
        pool = WorkerPool(
            "math",
            {"kind": "math", "relative_tolerance": 1e-6},
            probes=[Probe({"gold": "1", "answer": "1"}, 1.0), Probe({"gold": "1", "answer": "1"}, 0.0)],
        )
        with pytest.raises(RewardStartError, match=r"math\[0\] failed its self-test: .* must score 0"):
            await pool.start()
        assert pool.pids == ()
        await pool.close()

    asyncio.run(run())


def test_a_wall_that_does_not_hold_refuses_to_start(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I15: a system on which the CPU limit does not end a hanging input is found out before the run."""
    monkeypatch.setattr(worker_pool, "_PROVEN_MEMORY_BYTES", set())
    original = WorkerProcess.request

    async def without_cpu_limit(self: Any, operation: str, *, deadline_s: float, cpu_s: float, **fields: Any) -> Any:
        if fields.get("probe") == "spin":
            deadline_s, cpu_s = 0.3, 1e6
        return await original(self, operation, deadline_s=deadline_s, cpu_s=cpu_s, **fields)

    monkeypatch.setattr(WorkerProcess, "request", without_cpu_limit)

    async def nothing(reward: FunctionReward) -> None:
        raise AssertionError("it started")

    with pytest.raises(RewardStartError, match="'spin' should have been ended by the cpu limit, but: wall clock"):
        with_reward(f"{user_file}:behave", nothing)


def test_a_runaway_pattern_is_killed() -> None:
    """A user's regular expression can backtrack without end on a policy's reply."""

    async def run() -> None:
        config = RewardConfig(type="format", deadline_s=1.0, options={"pattern": r"(a+)+b"})
        reward = build_rewards([config])
        try:
            await reward.start()
            started = time.monotonic()
            result = await reward.score(episode("a" * 64))
            assert isinstance(result, ScoreError) and result.error_class is ErrorClass.TIMEOUT
            assert time.monotonic() - started < 2
            assert await reward.score(episode("aab")) == Score(value=1.0, components={"format": 1.0})
            assert await reward.score(episode("aabc")) == Score(value=0.0, components={"format": 0.0})
        finally:
            await reward.close()

    asyncio.run(run())
