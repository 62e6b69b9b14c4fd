"""The worker process: ``python -m headrace.rewards.worker``. Reads requests, judges, answers; killable at any time.

Protocol: JSON lines. The first line in sets the limits and names the judge; then ``{"id": 1, "op": "score",
"payload": {...}, "cpu_s": 5.0}`` is answered by ``{"id": 1, "score": {...}}`` or ``{"id": 1, "error": {...}}``.

Three walls around a judge, of which the parent trusts none but the last:

* CPU seconds: ITIMER_PROF with the default action. The kernel ends the process, even inside a C call that a Python
  signal handler would wait for. What dies so was too expensive to verify, however busy the machine.
* Memory: RLIMIT_AS, set before anything heavy is imported.
* Wall clock: the parent kills the process group.

Standard input and output are moved to private descriptors first: what user code prints goes to standard error and
cannot break the protocol, and it finds nothing to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from headrace.child_process import die_with_parent
from headrace.rewards.judges import Judge, load_judge
from headrace.types import ErrorClass, Score, ScoreError, ScoreResult

_MAX_MESSAGE_CHARS = 600


def main() -> int:
    requests, answers = _private_pipes()
    setup = json.loads(requests.readline())
    die_with_parent(setup["parent_pid"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    judge: Judge | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {"id": request["id"]}
        fatal = False
        try:
            with _cpu_limit(request["cpu_s"]):
                if request["op"] == "load":
                    judge = load_judge(setup["judge"])
                    answer["loaded"] = list(judge.value_range)
                elif request["op"] == "probe":
                    _PROBES[request["probe"]](setup["memory_bytes"])
                elif judge is None:
                    raise RuntimeError("a score was asked for before the judge was loaded")
                else:
                    answer |= _as_json(judge.score(request["payload"]))
        except MemoryError:
            answer |= _as_json(
                _error(ErrorClass.MEMORY, f"the memory cap of {setup['memory_bytes']} bytes was reached")
            )
            fatal = True  # whatever was half done when memory ran out is not to be trusted
        except Exception as error:
            answer |= _as_json(_error(ErrorClass.EXCEPTION, f"{type(error).__name__}: {error}"))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if fatal:
            return 0
    return 0


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, answers


@contextlib.contextmanager
def _cpu_limit(cpu_s: float) -> Iterator[None]:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _as_json(result: ScoreResult) -> dict[str, Any]:
    if isinstance(result, Score):
        return {"score": {"value": result.value, "components": dict(result.components), "value_T": result.value_T}}
    return {"error": {"error_class": str(result.error_class), "message": result.message[:_MAX_MESSAGE_CHARS]}}


def _error(error_class: ErrorClass, message: str) -> ScoreError:
    return ScoreError(error_class=error_class, message=message)


# ------------------------------------------------------------------------------------- self-test (I15)


def _probe_ready(memory_bytes: int) -> None:
    """Answers at once: the process is up."""


def _probe_spin(memory_bytes: int) -> None:
    """A hanging input that uses the CPU."""
    while True:
        pass


def _probe_sleep(memory_bytes: int) -> None:
    """A hanging input that uses nothing: only the parent's clock can end it. It refuses to be interrupted."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)


def _probe_bomb(memory_bytes: int) -> None:
    """A memory bomb. Untouched zero pages count for the cap, so that the machine itself is not troubled."""
    hoard = []
    step = max(min(memory_bytes // 8, 1 << 28), 1 << 20)
    for _ in range(2 * memory_bytes // step):
        hoard.append(bytes(step))  # calloc: the pages are never touched
    raise RuntimeError(f"{2 * memory_bytes} bytes could be allocated: the memory cap does not hold on this system")


_PROBES: dict[str, Callable[[int], None]] = {
    "ready": _probe_ready,
    "spin": _probe_spin,
    "sleep": _probe_sleep,
    "bomb": _probe_bomb,
}


if __name__ == "__main__":
    sys.exit(main())
