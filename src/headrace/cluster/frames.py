"""Frames on a socket between two processes of one machine: a length (8 bytes, big endian), then as many bytes."""

from __future__ import annotations

import asyncio
import struct

from headrace.cluster.wire import WireError

MAX_FRAME_BYTES = 1 << 32
_LENGTH = struct.Struct(">Q")


def frame(body: bytes) -> bytes:
    """Raises WireError for a body that nobody would take."""
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body):,} bytes is above the limit of {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next body; None where the other side is gone, also in the middle of a frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise WireError(f"a frame claims {length:,} bytes, above the limit of {MAX_FRAME_BYTES:,}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
