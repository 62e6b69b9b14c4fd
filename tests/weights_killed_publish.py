"""Publishes weights in a folder and is killed at every single file operation in turn; says what stood afterwards.

A script, not a test: it imports torch once and then forks for each operation. Arguments: the kind of sender, and a
folder to work in. Prints one line of JSON for each operation: which it was, how the publisher ended, and the versions
that a reader found (its checksums compared here with those of the old and the new weights).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksums
from headrace.weights.file import DeltaSender, FileSender
from headrace.weights.receivers import make_receiver

SENDERS = {"file": FileSender, "delta": DeltaSender}
OPERATIONS = ("open", "write", "fsync", "replace", "unlink")


def tensors(number: int) -> dict[str, torch.Tensor]:
    """Version ``number``: every version moves one value in fifty."""
    made = {name: torch.arange(400, dtype=torch.float32) for name in ("a", "b", "c")}
    for step in range(number):
        for tensor in made.values():
            tensor[step::50] += 1.0
    return made


def publish(sender: Any, number: int) -> None:
    sender.send(WeightUpdate(version=PolicyVersion(0, number), tensors=tensors(number)), None)


def die_at(number: int) -> None:
    """Of the file operations from now on, the one of this number is cut short by SIGKILL: a write half way."""
    count = 0

    def dying(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, dying(name, getattr(os, name)))


def found(folder: Path) -> Any:
    """The number of the version that an engine that joins now gets, if it is whole."""
    receiver = make_receiver({"type": "delta", "path": str(folder)})
    read = receiver.catch_up()
    if checksums(read.tensors.items()) != checksums(tensors(read.version.number).items()):
        return f"weights of no version under {read.version}"
    return read.version.number


def main(kind: str, folder: Path) -> None:
    options = {"keep": 1, "shard_bytes": 2000}
    operation, ended = 0, -signal.SIGKILL
    while ended == -signal.SIGKILL:
        operation += 1
        shutil.rmtree(folder, ignore_errors=True)
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            sender = SENDERS[kind](folder, **options)
            for number in (1, 2, 3):
                publish(sender, number)
            die_at(operation)
            publish(sender, 4)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        after_kill = found(folder)
        with_another = SENDERS[kind](folder, **options)
        publish(with_another, 5)
        with_another.close()
        left = sorted(path.name for path in folder.iterdir() if "0.4" in path.name or path.name.endswith(".tmp"))
        row = {"operation": operation, "ended": ended, "found": after_kill, "then": found(folder), "left": left}
        print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
