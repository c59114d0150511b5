"""The messages between a parent and its members: length-prefixed msgpack over a pair of sockets.

Both ends are this very version of this program, started by one command, so there is nothing to negotiate.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import msgspec

MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024  # all series of 64 processes stay far below it

_PREFIX: Final = struct.Struct(">I")


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Member: I can be given connections."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Member: a client requests the metrics of the group; `snapshot` holds this member's."""

    number: int
    snapshot: bytes


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """Parent, to the requesting member: the metrics of all others, and the counts of processes that have ended."""

    number: int
    snapshots: list[bytes]


class Take(msgspec.Struct, frozen=True, tag=True):
    """Parent: give me your metrics."""

    number: int


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """Member: here they are."""

    number: int
    snapshot: bytes


class Share(msgspec.Struct, frozen=True, tag=True):
    """Member: from now on this holds for the group. Parent: a member reported it."""

    number: int
    key: str
    value: bytes


class Shared(msgspec.Struct, frozen=True, tag=True):
    """Parent: every member has received it."""

    number: int


class Standing(msgspec.Struct, frozen=True, tag=True):
    """Parent, to all, after every change: how the group is doing."""

    serving: int
    configured: int


class MemberQuestion(msgspec.Struct, frozen=True, tag=True):
    """Member: a question for all others. Parent: such a question, under a number of the parent's."""

    number: int
    question: bytes


class MemberAnswer(msgspec.Struct, frozen=True, tag=True):
    """Member: the answer to a question of the parent's."""

    number: int
    answer: bytes


class GroupAnswers(msgspec.Struct, frozen=True, tag=True):
    """Parent, to the requesting member: the answers of the others, and the names of those that gave none in time."""

    number: int
    answers: list[bytes]
    silent: list[str]


Message = (
    Ready
    | Gather
    | Gathered
    | Take
    | Snapshot
    | Share
    | Shared
    | Standing
    | MemberQuestion
    | MemberAnswer
    | GroupAnswers
)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Message).decode


def write(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queue one message; nothing when the other end is gone."""
    if not writer.is_closing():
        payload = _encode(message)
        writer.writelines([_PREFIX.pack(len(payload)), payload])


async def read(reader: asyncio.StreamReader) -> Message | None:
    """Read the next message; None when the other end is gone."""
    try:
        (size,) = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
        if size > MAX_MESSAGE_BYTES:
            raise RuntimeError(f"a message of {size} bytes inside the group of frontend processes")
        message: Message = _decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message
