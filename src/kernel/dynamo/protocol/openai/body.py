"""From body bytes to a typed request: bounded nesting, strict JSON first, then a mended second try.

Every failure is a 400 whose text ends in what was expected and where (`` at `$.messages[0].role` ``).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, TypeVar

import msgspec

from dynamo.protocol.openai.errors import RequestRejected

T = TypeVar("T")

# Decodes a body of megabytes in steps of about a millisecond each.
#
# A JSON decoder reads a body in one piece and with the interpreter lock: 12 MB of escapes take 90 ms, in which no other thread
# runs and no stream gets its token, whichever thread decodes. So the long strings are cut out first and decoded in slices; what
# is left has short names in their places, and these are exchanged for the texts afterwards.

LARGE_BYTES: Final = 1024 * 1024  # a shorter body is decoded as it is: at most 8 ms
LONG_BYTES: Final = 64  # a string from this length on is cut out
TEXT_SLICE_BYTES: Final = 256 * 1024  # of a string that are decoded in one go: at most 2 ms
MAX_REST_BYTES: Final = 2 * LARGE_BYTES
"""What may be left without the long strings, to be decoded in one piece: more than a body within the limits on members and items
has, unless its strings are many and just below `LONG_BYTES`."""

_decode_text: Final = msgspec.json.Decoder(str).decode
_AFTER_STRING: Final = re.compile(rb"[ \t\r\n]{0,64}:")
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LONGEST_ESCAPE: Final = 6  # \uXXXX


class TooMuchStructure(Exception):
    """A body has more beside its long strings than may be decoded in one piece."""


def decode_in_steps(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Decode `body` like `decode`, which makes msgspec structs, lists and dicts of it.

    Raises what `decode` raises, and TooMuchStructure. Positions in the messages of decode errors are those of the rest.
    """
    spans = list(_long_strings(body))
    if not spans:
        if len(body) > MAX_REST_BYTES:
            raise TooMuchStructure
        return decode(body)
    mark = secrets.token_hex(8)  # a client that could guess it could name texts of its own
    parts: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        parts += (body[at:start], b"%b:%d" % (mark.encode(), number))
        at = end
    parts.append(body[at:])
    rest = b"".join(parts)
    if len(rest) > MAX_REST_BYTES:
        raise TooMuchStructure
    texts = [_text(body, start, end) for start, end in spans]
    value = decode(rest)
    _exchange(value, mark + ":", texts)
    return value


def _long_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what stands between the quotes of each long string that is no key."""
    find = body.find
    opening = find(b'"')
    while opening >= 0:
        closing = seen = opening
        while True:
            closing = find(b'"', closing + 1)
            if closing < 0:
                return  # not JSON, as `decode` will find
            if body[closing - 1] != 0x5C:
                break
            before = body[seen + 1 : closing]
            if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
                break
            seen = closing
        if closing - opening > LONG_BYTES and _AFTER_STRING.match(body, closing + 1) is None:
            yield opening + 1, closing
        opening = find(b'"', closing + 1)


def _text(body: bytes, start: int, end: int) -> str:
    """Decode what stands between two quotes. Raises msgspec.DecodeError."""
    texts = []
    while end - start > TEXT_SLICE_BYTES:
        cut = _cut(body[start : start + TEXT_SLICE_BYTES])
        texts.append(_decode_text(b'"%b"' % body[start : start + cut]))
        start += cut
    texts.append(_decode_text(b'"%b"' % body[start:end]))
    return texts[0] if len(texts) == 1 else "".join(texts)


def _cut(piece: bytes) -> int:
    """Return how much of `piece`, which begins with a whole character, ends with a whole character too.

    It divides neither the bytes of a code point, nor an escape, nor the two escapes of one code point.
    """
    cut = len(piece)
    while cut > len(piece) - 4 and piece[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    if piece[cut - 1] >= 0xC0:
        cut -= 1  # the first byte of a code point whose others may follow
    elif cut < len(piece):
        cut = len(piece)  # continuation bytes without a first one: not text, as the decoder will find
    last = piece.rfind(b"\\", max(0, cut - _LONGEST_ESCAPE), cut)
    if last >= 0 and _is_escape(piece, last):
        is_unicode = piece[last + 1 : last + 2] in (b"u", b"")
        if last + (_LONGEST_ESCAPE if is_unicode else 2) > cut or _HIGH_SURROGATE.match(piece, last) is not None:
            cut = last
    before = cut - _LONGEST_ESCAPE
    if before >= 0 and _HIGH_SURROGATE.match(piece, before) is not None and _is_escape(piece, before):
        cut = before
    return cut or len(piece)


def _is_escape(piece: bytes, at: int) -> bool:
    """Return whether the backslash at `at` begins an escape, and is not the second of two."""
    before = piece[:at]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0


def _exchange(value: Any, mark: str, texts: list[str]) -> None:
    """Put the texts where their names are, in place."""
    waiting: list[Any] = [value]
    while waiting:
        holder = waiting.pop()
        for place, member in _members(holder):
            if isinstance(member, str):
                if member.startswith(mark):
                    _put(holder, place, texts[int(member[len(mark) :])])
            elif isinstance(member, dict | list | msgspec.Struct):
                waiting.append(member)


def _members(holder: Any) -> list[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, list):
        return list(enumerate(holder))
    return [(name, getattr(holder, name)) for name in holder.__struct_fields__]


def _put(holder: Any, place: Any, text: str) -> None:
    if isinstance(holder, dict | list):
        holder[place] = text
    else:
        msgspec.structs.force_setattr(holder, place, text)


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
