"""The carrier of child processes: calls, errors and every way of dying (I19, F106), with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.actors import ActorDied, RemoteError
from headrace.cluster.spec import ActorNotMade, ActorSpec
from headrace.cluster.subprocess_actor import SubprocessActor
from headrace.types import AttemptKey, PolicyVersion, Score, Task

TESTS = Path(__file__).parents[1]


def spec(name: str = "Echo", **options: Any) -> ActorSpec:
    return ActorSpec(role="environment", index=3, incarnation=1, factory=f"cluster_targets:{name}", options=options)


def with_actor(tmp_path: Path, use: Callable[[SubprocessActor], Awaitable[None]], made: ActorSpec | None = None) -> int:
    """Run ``use`` on a fresh actor; returns its process id. Nothing of it is left."""

    async def main() -> int:
        actor = await SubprocessActor.start(made or spec(), log=tmp_path / "log", deadline_s=60.0)
        try:
            async with asyncio.timeout(60.0):
                await use(actor)
        finally:
            await actor.close()
        return actor.pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    return pid


def test_values_of_our_vocabulary_travel_both_ways(tmp_path: Path) -> None:
    """Ids, versions, floats (NaN and infinities too) and records arrive as they were sent."""
    task = Task(
        id="a", messages=({"role": "user", "content": "\u03b1"},), answer=[1, 2.5, None], metadata={"k": (1, 2)}
    )
    values = [0.1, float("inf"), (1, (2, 3)), {"a": [True]}, task, AttemptKey(1, 2), PolicyVersion(0, 7), b"\0\xff",
              Score(value=0.5, components={"x": 1e-300}), None]  # fmt: skip

    async def use(actor: SubprocessActor) -> None:
        for value in values:
            assert await actor.call("echo", value) == value
        answers = await asyncio.gather(*(actor.call("echo", i) for i in range(200)))
        assert answers == list(range(200))

    with_actor(tmp_path, use)


def test_what_a_method_raises_comes_as_a_remote_error_and_the_actor_lives_on(tmp_path: Path) -> None:
    async def use(actor: SubprocessActor) -> None:
        with pytest.raises(RemoteError, match="KeyError: 'no such thing'"):
            await actor.call("fail")
        with pytest.raises(RemoteError, match="no public method '_prefix'"):
            await actor.call("_prefix")
        with pytest.raises(RemoteError, match=r"WireError.*object cannot travel"):
            await actor.call("unspeakable")
        assert await actor.is_alive()
        assert await actor.call("echo", 1) == 1

    with_actor(tmp_path, use)


def test_a_caller_that_gives_up_cancels_the_call_there(tmp_path: Path) -> None:
    """I19: a deadline at the caller frees the worker too."""

    async def use(actor: SubprocessActor) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await actor.call("wait")
        while await actor.call("num_cancelled") != 1:
            await asyncio.sleep(0.005)

    with_actor(tmp_path, use)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_actor_fails_open_and_later_calls_at_once_and_names_the_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    """F106: nobody waits for a process that is gone."""

    async def use(actor: SubprocessActor) -> None:
        waiting = asyncio.ensure_future(actor.call("wait"))
        await actor.call("echo", 1)
        os.kill(actor.pid, number)
        with pytest.raises(ActorDied, match=rf"actor environment-3.1 \(process \d+\) was killed by {number.name}"):
            await waiting
        with pytest.raises(ActorDied):
            await actor.call("echo", 1)
        assert not await actor.is_alive()

    with_actor(tmp_path, use)


def test_an_actor_that_exits_tells_its_status_and_its_last_words(tmp_path: Path) -> None:
    async def use(actor: SubprocessActor) -> None:
        with pytest.raises(ActorDied, match=r"(?s)exited with status 3; its last words .*these are my last words"):
            await actor.call("leave", 3)

    with_actor(tmp_path, use)


def test_close_ends_a_process_that_holds_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: it cannot see that its socket is closed; it is killed after its deadline."""
    monkeypatch.setattr("headrace.cluster.subprocess_actor.END_DEADLINE_S", 0.2)

    async def use(actor: SubprocessActor) -> None:
        asyncio.ensure_future(actor.call("spin")).add_done_callback(lambda call: call.exception())
        await asyncio.sleep(0.05)

    with_actor(tmp_path, use)


def test_a_factory_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ActorNotMade, match="could not be made: RuntimeError: no disk, no model"):
        with_actor(tmp_path, lambda actor: asyncio.sleep(0), spec("failing"))
    assert "Traceback" in (tmp_path / "log").read_text()


def test_an_actor_that_is_not_ready_in_time_is_ended_and_says_what_it_printed(tmp_path: Path) -> None:
    """I19: a start has a deadline and a name."""

    async def main() -> None:
        await SubprocessActor.start(spec("slow"), log=tmp_path / "log", deadline_s=3.0)

    with pytest.raises(ActorDied, match=r"(?s)environment-3.1 was not ready after 3 s.*still loading"):
        asyncio.run(main())


def test_an_inherited_descriptor_reaches_the_factory(tmp_path: Path) -> None:
    async def main() -> bytes:
        with tempfile.TemporaryFile() as file:
            file.write(b"weights")
            file.flush()
            actor = await SubprocessActor.start(
                spec(), log=tmp_path / "log", deadline_s=60.0, inherited_fd=file.fileno()
            )
            try:
                return bytes(await actor.call("read_inherited"))
            finally:
                await actor.close()

    assert asyncio.run(main()) == b"weights"


def test_environment_and_reward_workers_start_without_torch(tmp_path: Path) -> None:
    """They are many, and may be restarted often: neither time nor memory for a library that they do not use."""

    async def use(actor: SubprocessActor) -> None:
        assert not {"torch", "transformers", "ray"} & set(await actor.call("loaded_modules"))

    with_actor(tmp_path, use)


def test_an_actor_ends_with_its_caller(tmp_path: Path) -> None:
    """kill -9 of the controller leaves no orphan, also where the actor's interpreter is held."""
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from headrace.cluster.spec import ActorNotMade, ActorSpec\n"
        "from headrace.cluster.subprocess_actor import SubprocessActor\n"
        "async def main():\n"
        "    spec = ActorSpec(role='reward', index=0, incarnation=0, factory='cluster_targets:Echo')\n"
        "    actor = await SubprocessActor.start(spec, log=Path(sys.argv[1]), deadline_s=60)\n"
        "    print(actor.pid, flush=True)\n"
        "    await actor.call('spin')\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline_s = time.monotonic() + 20.0
    while Path(f"/proc/{pid}/status").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline_s, "the actor outlived its caller"
        time.sleep(0.02)
