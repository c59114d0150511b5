"""The messages of external processing: what the proxy sends as records, and what is sent back as bytes. See ext_proc.proto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

from msgspec import Struct

from dynamo.picker.wire import (
    Fields,
    MalformedMessage,
    every_bytes,
    last_bytes,
    last_number,
    of_bytes,
    of_number,
    read,
    read_struct,
    struct_of,
    struct_value,
    text_of,
    text_value,
)

CHUNK_BYTES: Final = 62_000  # some proxies refuse bodies of 64 KiB in one message
_OVERWRITE: Final = 2
_CONFIGURATION: Final = 11
_METADATA: Final = 8
_HEADER, _NAME, _RAW_VALUE = 1 << 3 | 2, 1 << 3 | 2, 3 << 3 | 2  # how these fields begin on the wire
_KEPT_BYTES: Final = 1024  # of metadata that are kept as read: nearly all messages have those of others


class MessagePhase(IntEnum):
    """The phase of a message: its field number in a ProcessingRequest."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


# A member of an enumeration takes ten times as long to look up as a name of this file.
_REQUEST_HEADERS: Final = MessagePhase.REQUEST_HEADERS
_BODIES: Final = frozenset({MessagePhase.REQUEST_BODY, MessagePhase.RESPONSE_BODY})
_TRAILERS: Final = frozenset({MessagePhase.REQUEST_TRAILERS, MessagePhase.RESPONSE_TRAILERS})
_PHASES: Final = {int(phase): phase for phase in MessagePhase}
# The field number of the answer to each phase, in a ProcessingResponse.
_ANSWER: Final = {
    MessagePhase.REQUEST_HEADERS: 1,
    MessagePhase.RESPONSE_HEADERS: 2,
    MessagePhase.REQUEST_BODY: 3,
    MessagePhase.RESPONSE_BODY: 4,
    MessagePhase.REQUEST_TRAILERS: 5,
    MessagePhase.RESPONSE_TRAILERS: 6,
}
_IMMEDIATE: Final = 7


class BodyMode(IntEnum):
    """How the proxy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


class Modes(Struct, frozen=True):
    """How the proxy sends the bodies of one HTTP request and of its answer."""

    request: int = BodyMode.NONE
    response: int = BodyMode.NONE


class Message(Struct, frozen=True):
    """One message of the proxy."""

    phase: MessagePhase
    headers: Sequence[tuple[bytes, bytes]] = ()  # of a request; names in lower case
    body: bytes = b""
    is_last: bool = False  # nothing of this direction follows
    metadata: Mapping[str, Mapping[str, object]] = {}  # by namespace
    modes: Modes | None = None  # in the first message of a stream


def read_message(data: bytes) -> Message:
    """Read one message of the proxy. Raises MalformedMessage."""
    fields = read(data)
    phase = next(filter(None, map(_PHASES.get, fields)), None)
    if phase is None:
        raise MalformedMessage("a message without a phase")
    inner = read(last_bytes(fields, phase) or b"")
    headers: Sequence[tuple[bytes, bytes]] = ()
    body = b""
    if phase in _BODIES:
        body, is_last = last_bytes(inner, 1) or b"", bool(last_number(inner, 2))
    else:
        if phase is _REQUEST_HEADERS:  # nothing is done with those of an answer
            headers = _read_headers(last_bytes(inner, 1) or b"")
        is_last = phase in _TRAILERS or bool(last_number(inner, 3))
    return Message(phase, headers, body, is_last, _read_metadata(fields), _read_modes(fields))


def _read_headers(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a HeaderMap. Nearly all are short: a name and a value of less than 128 bytes, each in its place."""
    found: list[tuple[bytes, bytes]] = []
    at, end = 0, len(data)
    while at + 4 <= end and data[at] == _HEADER and (size := data[at + 1]) < 0x80 and data[at + 2] == _NAME:
        stop, value_at = at + 2 + size, at + 4 + data[at + 3]
        if stop > end or value_at + 2 > stop or value_at + 2 + data[value_at + 1] != stop:
            break
        if data[value_at] != _RAW_VALUE:
            break
        found.append((data[at + 4 : value_at].lower(), data[value_at + 2 : stop]))
        at = stop
    for header in every_bytes(read(data[at:]), 1) if at < end else ():
        fields = read(header)
        value = last_bytes(fields, 3) or last_bytes(fields, 2) or b""  # `raw_value`, or `value` of older proxies
        found.append(((last_bytes(fields, 1) or b"").lower(), value))
    return found


def _read_metadata(fields: Fields) -> Mapping[str, Mapping[str, object]]:
    context = last_bytes(fields, _METADATA)
    if not context:
        return {}
    return _metadata_of(context) if len(context) <= _KEPT_BYTES else _metadata_of.__wrapped__(context)


@lru_cache(1024)
def _metadata_of(context: bytes) -> Mapping[str, Mapping[str, object]]:
    found = {}
    for entry in every_bytes(read(context), 1):
        pair = read(entry)
        found[text_of(last_bytes(pair, 1) or b"")] = read_struct(last_bytes(pair, 2) or b"")
    return found


def _read_modes(fields: Fields) -> Modes | None:
    configuration = last_bytes(fields, _CONFIGURATION)
    return None if configuration is None else _modes_of(configuration)


@lru_cache(64)
def _modes_of(configuration: bytes) -> Modes:
    modes = read(configuration)
    return Modes(last_number(modes, 1), last_number(modes, 2))


class Mutation(Struct, frozen=True):
    """What is changed of a request's headers, and the metadata beside it."""

    set_headers: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    metadata: tuple[str, str, str] | None = None  # namespace, key, text


_NOTHING: Final = Mutation()


@lru_cache(4096)  # few workers, and the same few phases: nearly every answer was written before
def answer(phase: MessagePhase, mutation: Mutation = _NOTHING, *, reroutes: bool = False) -> bytes:
    """Answer one phase. `reroutes`: the proxy chooses its route anew, by the changed headers."""
    headers = _header_mutation(mutation.set_headers, mutation.removed)
    if phase in _TRAILERS:
        return of_bytes(_ANSWER[phase], b"")
    common = (of_bytes(2, headers) if headers else b"") + (of_number(5, 1) if reroutes else b"")
    written = of_bytes(_ANSWER[phase], of_bytes(1, common))
    if mutation.metadata is not None:
        namespace, key, text = mutation.metadata
        value = struct_value(struct_of([(key, text_value(text))]))
        written += of_bytes(_METADATA, struct_of([(namespace, value)]))
    return written


def body_chunks(phase: MessagePhase, body: bytes, *, is_last: bool) -> list[bytes]:
    """Pass a body on in a full duplex, in messages that every proxy takes."""
    parts = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)] or [b""]
    return [_streamed(phase, part, is_last=is_last and at == len(parts) - 1) for at, part in enumerate(parts)]


def _streamed(phase: MessagePhase, body: bytes, *, is_last: bool) -> bytes:
    streamed = of_bytes(1, body) + (of_number(2, 1) if is_last else b"")
    return of_bytes(_ANSWER[phase], of_bytes(1, of_bytes(3, of_bytes(3, streamed))))


def immediate(status: int, body: bytes, headers: Iterable[tuple[str, str]] = (), details: str = "") -> bytes:
    """Answer the client at once in place of any worker."""
    written = of_bytes(1, of_number(1, status))
    written += of_bytes(2, _header_mutation(headers, ()))
    written += of_bytes(3, body)
    if details:
        written += of_bytes(5, details.encode())
    return of_bytes(_IMMEDIATE, written)


def _header_mutation(headers: Iterable[tuple[str, str]], removed: Iterable[str]) -> bytes:
    written = b""
    for name, value in headers:
        header = of_bytes(1, name.encode()) + of_bytes(3, value.encode("latin-1", "replace"))
        written += of_bytes(1, of_bytes(1, header) + of_number(3, _OVERWRITE))
    return written + b"".join(of_bytes(2, name.encode()) for name in removed)
