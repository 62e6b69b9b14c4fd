"""The process of one actor: ``python -m headrace.cluster.child --socket FD [--inherit FD]``, started by its caller.

The first frame says what to make (:class:`headrace.cluster.spec.ActorSpec`); the answer is ``{"ready": {...}}`` or
``{"failed": "..."}``. From then on frames are the messages of ``actors.py``. The process ends when the socket does: its
caller is the only one who can reach it, so without that one it is of no use to anybody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import traceback
from typing import Any

from headrace.child_process import die_with_parent
from headrace.cluster.actors import ActorHost
from headrace.cluster.frames import frame, read_frame
from headrace.cluster.spec import load_factory
from headrace.cluster.wire import WireError, decode, encode

EXIT_FAILED = 4


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace.cluster.child")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--inherit", type=int, help="a descriptor that the factory gets as 'inherited_fd'")
    parser.add_argument("--parent", type=int, required=True)
    parsed = parser.parse_args(arguments)
    die_with_parent(parsed.parent)  # the socket's end is noticed between two calls only
    return asyncio.run(_serve(socket.socket(fileno=parsed.socket), parsed.inherit))


async def _serve(connection: socket.socket, inherited_fd: int | None) -> int:
    reader, writer = await asyncio.open_connection(sock=connection)
    first = await read_frame(reader)
    if first is None:
        return EXIT_FAILED
    spec = decode(first)
    options = dict(spec["options"])
    if inherited_fd is not None:
        options["inherited_fd"] = inherited_fd
    try:
        target = load_factory(spec["factory"])(**options)
        if asyncio.iscoroutine(target):
            target = await target
    except Exception as error:
        traceback.print_exc()  # into the log
        writer.write(frame(encode({"failed": f"{type(error).__name__}: {error}"})))
        await writer.drain()
        return EXIT_FAILED

    def send(message: dict[str, Any]) -> None:
        try:
            body = encode(message)
        except WireError as error:  # a result that cannot travel is an answer, too
            body = encode({k: v for k, v in message.items() if k != "value"} | {"error": ["WireError", str(error)]})
        writer.write(frame(body))

    host = ActorHost(spec["session"], target, send)
    writer.write(frame(encode({"ready": {"pid": os.getpid()}})))
    while (body := await read_frame(reader)) is not None:
        host.receive(decode(body))
    host.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a factory's object must not hold a process that nobody can reach


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
