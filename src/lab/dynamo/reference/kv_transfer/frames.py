"""The frames two workers exchange on a transfer connection; bytes in, values out.

    magic "DKV1" | kind u16 | 0 u16 | number u32 | length u32 | checksum u64 | payload      big-endian

The checksum is xxh3-64 of the payload, seeded with kind and number, so that a frame cannot pass for another one either.

    puller: PULL {transfer_id, secret, first, count, layout, direct}
    holder: PAGE number=position, one per block, in order       (or DIRECT, which gives where they are in memory)
    puller: DONE                                                everything is here
    holder: FREED                                               it was held until now: what you have is good
    holder: REFUSED text                                        in place of any of its frames; then it closes
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo.errors import StreamIncomplete
from dynamo.reference.kv_transfer.base import Layout

MAGIC: Final = b"DKV1"
_HEADER: Final = struct.Struct("!4sHHIIQ")
HEADER_BYTES: Final = _HEADER.size


class TransferKind(IntEnum):
    PULL = 1
    PAGE = 2
    DIRECT = 3
    DONE = 4
    FREED = 5
    REFUSED = 6


LIMITS: Final = {  # bytes of a payload; a page has exactly its size
    TransferKind.PULL: 4096,  # a stranger may send it
    TransferKind.DIRECT: 1024 * 1024,  # an agent's metadata, and five bytes a block
    TransferKind.DONE: 0,
    TransferKind.FREED: 0,
    TransferKind.REFUSED: 4096,
}


class Header(NamedTuple):
    kind: TransferKind
    number: int
    length: int  # bytes of the payload
    checksum: int


class Pull(msgspec.Struct, frozen=True):
    """The request of a decode worker."""

    transfer_id: Annotated[str, msgspec.Meta(max_length=64)]
    secret: Annotated[str, msgspec.Meta(max_length=64)]
    first: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    count: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    layout: Layout
    direct: bool = False  # the puller reads memory itself


_PULL: Final = msgspec.msgpack.Decoder(Pull)


def frame(kind: TransferKind, payload: bytes = b"", number: int = 0) -> bytes:
    """Return the header and the payload of a frame."""
    return _HEADER.pack(MAGIC, kind, 0, number, len(payload), _checksum(kind, number, payload)) + payload


def read_header(data: bytes, *, page_bytes: int) -> Header:
    """Raises StreamIncomplete for what is no header, or announces more than a frame of its kind may hold."""
    magic, kind, zero, number, length, checksum = _HEADER.unpack(data)
    if magic != MAGIC or zero != 0 or kind not in TransferKind._value2member_map_:
        raise StreamIncomplete("the peer does not speak this version of the KV transfer")
    if kind == TransferKind.PAGE and length != page_bytes:
        raise StreamIncomplete(f"a page of {length} bytes came where {page_bytes} belong")
    if kind != TransferKind.PAGE and length > LIMITS[TransferKind(kind)]:
        limit = LIMITS[TransferKind(kind)]
        raise StreamIncomplete(f"a {TransferKind(kind).name} frame of {length} bytes came, at most {limit} are allowed")
    return Header(TransferKind(kind), number, length, checksum)


def check(header: Header, payload: bytes) -> None:
    """Raises StreamIncomplete unless the payload is the one that was sent."""
    if _checksum(header.kind, header.number, payload) != header.checksum:
        raise StreamIncomplete(f"a {header.kind.name} frame was damaged on its way")


def decode_pull(payload: bytes) -> Pull:
    """Raises StreamIncomplete for anything else."""
    try:
        return _PULL.decode(payload)
    except msgspec.MsgspecError as error:
        raise StreamIncomplete(f"no pull: {error}") from error


def _checksum(kind: int, number: int, payload: bytes) -> int:
    return xxh3_64_intdigest(payload, seed=kind << 32 | number)
