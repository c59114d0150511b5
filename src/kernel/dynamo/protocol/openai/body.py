"""From body bytes to a typed request: bounded nesting, strict JSON first, then a mended second try.

Every failure is a 400 whose text ends in what was expected and where (`` at `$.messages[0].role` ``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, TypeVar

import msgspec

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.long_texts import (
    LARGE_BYTES,
    LONG_BYTES,
    MAX_REST_BYTES,
    TooMuchStructure,
    decode_in_steps,
)

MAX_DEPTH: Final = 128  # arrays and objects inside each other; JSON Schemas in the wild stay below 40
DEPTH_CEILING: Final = 512  # no setting goes beyond: templates and encoders recurse on the interpreter's own stack
MAX_MESSAGES: Final = 8192  # of one conversation; each costs a template some microseconds
MAX_CONTAINERS: Final = 1 << 18  # arrays and objects in one body: an empty one costs 60 bytes for 2 on the wire
MAX_MEMBERS: Final = 1 << 15  # of all objects: decoding one takes 0.5 us, in one piece and with the interpreter lock
MAX_ITEMS: Final = 1 << 18  # of all arrays, token ids for one: decoding one takes 0.05 us
SLICE_BYTES: Final = (
    1 << 15
)  # of a body that are scanned in one go: the pieces of a larger one are megabytes of objects
MAX_MENDED_BYTES: Final = LARGE_BYTES  # mending holds the interpreter lock for up to 20 ms for as much
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
DETAIL_LIMIT: Final = 512  # characters of a decoder's message we pass on: it may quote the client's own value

T = TypeVar("T")


class BodyLimits(msgspec.Struct, frozen=True):
    """What a body may hold."""

    depth: int = MAX_DEPTH
    messages: int = MAX_MESSAGES
    members: int = MAX_MEMBERS
    items: int = MAX_ITEMS


DEFAULT_LIMITS: Final = BodyLimits()

_NOT_STRUCTURE: Final = bytes(byte for byte in range(256) if byte not in b'[{:,"')

_PATH: Final = re.compile(r"`\$([^`]*)`")
_FIELD: Final = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]*)`")


def read_json(body: bytes, decode: Callable[[bytes], T], limits: BodyLimits = DEFAULT_LIMITS) -> tuple[T, bool]:
    """Decode a body; return the value, and whether the body had to be repaired first.

    Raises:
        msgspec.ValidationError: the JSON is well formed and not what `decode` expects.
        RequestRejected: it is not JSON, or nests too deep.
    """
    if body[:3] == BYTE_ORDER_MARK:  # RFC 8259, section 8.1: a reader may ignore it; tools of Windows write it
        body = body[3:]
    check_size(body, limits)
    try:
        return decode(body) if len(body) <= LARGE_BYTES else decode_in_steps(body, decode), False
    except TooMuchStructure:
        text = f"more than {MAX_REST_BYTES} bytes of JSON beside the strings of at least {LONG_BYTES} bytes"
        raise _refused(text, limit="json_structure") from None
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        strict = error
    if len(body) > MAX_MENDED_BYTES or (mended := mend(body)) == body:
        raise malformed(strict) from strict
    try:
        return decode(mended), True
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from error


def check_size(body: bytes, limits: BodyLimits = DEFAULT_LIMITS) -> None:
    """Refuse a body of more values than anything downstream should have to bear, before they exist.

    A body too short to hold so many passes at once. Others are counted in C and in slices, so that the interpreter lock is
    never held for long, and more closely only where text might be what counts.
    """
    least = min(MAX_CONTAINERS, limits.members, limits.items)
    if len(body) <= least or _is_small(body, limits):
        return
    containers = members = items = 0
    for structure in _structure_of(body):
        containers += structure.count(b"[") + structure.count(b"{")
        members += structure.count(b":")
        items += structure.count(b",")
        if containers > MAX_CONTAINERS:
            text = f"more than {MAX_CONTAINERS} JSON arrays and objects in one body"
            raise _refused(text, limit="json_containers")
        if members > limits.members:
            text = f"more than {limits.members} members of JSON objects in one body (DYN_HTTP_JSON_MEMBERS_LIMIT)"
            raise _refused(text, limit="json_members")
        if items > limits.items:
            text = f"more than {limits.items} items of JSON arrays in one body (DYN_HTTP_JSON_ITEMS_LIMIT)"
            raise _refused(text, limit="json_items")


def _is_small(body: bytes, limits: BodyLimits) -> bool:
    """Return whether the body has few structural characters, counting those inside strings."""
    containers = members = items = 0
    for start in range(0, len(body), SLICE_BYTES):
        end = start + SLICE_BYTES
        containers += body.count(b"[", start, end) + body.count(b"{", start, end)
        members += body.count(b":", start, end)
        items += body.count(b",", start, end)
        if containers > MAX_CONTAINERS or members > limits.members or items > limits.items:
            return False
    return True


def _structure_of(body: bytes) -> Iterator[bytes]:
    """Yield the brackets, colons and commas of a body in slices, without those in strings."""
    start, in_string = 0, 0
    while start < len(body):
        end = start + SLICE_BYTES
        part = body[start:end]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape stays in one piece
            end += 1
            part = body[start:end]
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.translate(None, _NOT_STRUCTURE).split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string = (in_string + len(pieces) - 1) % 2
        start = end


def check_messages(messages: Sized, limit: int) -> None:
    """Refuse a conversation of more than `limit` messages."""
    if len(messages) > limit:
        text = f"Maximum of {limit} messages are supported (DYN_HTTP_MESSAGES_LIMIT), got {len(messages)}"
        raise RequestRejected(400, text, param="messages", limit="messages")


def may_nest_deeper(body: bytes, limit: int) -> bool:
    """Return whether a body has as many brackets as values need that nest deeper than `limit`; few bodies have."""
    return body.count(b"[") + body.count(b"{") > limit


def check_depth(values: Iterable[Any], limit: int = MAX_DEPTH) -> None:
    """Refuse free-form values that nest deeper than `limit`. Level by level: no recursion of ours.

    The decoder gives up by itself near 1000 levels; this lower limit leaves room for code that recurses later
    (templates, the worker's wire), each with frames of its own.
    """
    level: list[Any] = [value for value in values if value.__class__ is dict or value.__class__ is list]
    depth = 0
    while level:
        depth += 1
        if depth > limit:
            raise _too_deep(limit)
        level = [
            child
            for value in level
            for child in (value.values() if value.__class__ is dict else value)
            if child.__class__ is dict or child.__class__ is list
        ]


def deserialisation_error(error: msgspec.ValidationError) -> RequestRejected:
    """Return the 400 for well-formed JSON of the wrong shape; `param` is the path to the fault."""
    detail = str(error)
    path = _PATH.search(detail)
    where = path[1].lstrip(".") if path else ""
    if (named := _FIELD.match(detail)) is not None:
        where = f"{where}.{named[1]}" if where else named[1]
    return _refused(detail, where or None)


def malformed(error: Exception) -> RequestRejected:
    """Return the 400 for bytes that are not valid JSON."""
    if isinstance(error, RecursionError):
        return _too_deep(DEPTH_CEILING)
    return _refused(str(error))


def _too_deep(limit: int) -> RequestRejected:
    return _refused(f"JSON nested deeper than {limit} levels (DYN_HTTP_JSON_DEPTH_LIMIT)", limit="json_depth")


def _refused(detail: str, param: str | None = None, *, limit: str | None = None) -> RequestRejected:
    if len(detail) > DETAIL_LIMIT:
        half = DETAIL_LIMIT // 2
        detail = f"{detail[:half]}...{detail[-half:]}"  # the path is at the end
    if param is not None and len(param) > DETAIL_LIMIT:
        param = param[:DETAIL_LIMIT]
    text = f"Failed to deserialize the JSON body into the target type: {detail}"
    return RequestRejected(400, text, param=param, limit=limit)


# Stand-ins while strings are taken apart: decoding with "replace" leaves no surrogate in the text.
_BACKSLASH: Final = "\ud800"
_QUOTE: Final = "\ud801"
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_SHORT_ESCAPES: Final = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}
_ESCAPES: Final = [(chr(code), _SHORT_ESCAPES.get(chr(code), f"\\u{code:04x}")) for code in range(0x20)]
_LONE_SURROGATE: Final = re.compile(
    r"(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


def mend(body: bytes) -> bytes:
    """Return `body` with the most frequent mistakes of clients repaired; every repair is linear and runs in C.

    Invalid UTF-8 becomes U+FFFD, raw control characters inside strings are escaped, and a `\\ud83d` without its other
    half (text cut in the middle of an emoji) becomes `\\ufffd`.
    """
    text = body.decode("utf-8", "replace")
    if "\\" in text:
        text = text.replace("\\\\", _BACKSLASH).replace('\\"', _QUOTE)
        if "\\u" in text:
            text = _LONE_SURROGATE.sub(lambda match: match["pair"] or r"\ufffd", text)
    if _CONTROL.search(text):
        parts = text.split('"')
        inside = '"'.join(parts[1::2])
        for raw, escaped in _ESCAPES:
            if raw in inside:
                inside = inside.replace(raw, escaped)
        parts[1::2] = inside.split('"') if len(parts) > 1 else []
        text = '"'.join(parts)
    return text.replace(_QUOTE, '\\"').replace(_BACKSLASH, "\\\\").encode()
