"""JSON that is also safe inside one line of an event stream."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode

# JSON allows these raw, and the event-stream format does not end a line at them, but many clients split lines as
# Python's `str.splitlines` does, which would cut the JSON in two.
_LINE_BREAKERS: Final = (
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
    (b"\xc2\x85", rb"\u0085"),
)


def json_text(text: str) -> bytes:
    """Return `text` as a JSON string with its quotes. A lone surrogate, which no UTF-8 can carry, becomes U+FFFD."""
    if text.isascii():
        return _encode(text)
    try:
        encoded = _encode(text)
    except UnicodeEncodeError:
        encoded = _encode(_without_lone_surrogates(text))
    if "\u2028" in text or "\u2029" in text or "\x85" in text:
        return _one_line(encoded)
    return encoded


def json_line(value: Any) -> bytes:
    """Return any value of plain types as JSON; strings as in `json_text`."""
    try:
        encoded = _encode(value)
    except UnicodeEncodeError:
        encoded = _encode(_mended(value))
    return encoded if encoded.isascii() else _one_line(encoded)


def _one_line(encoded: bytes) -> bytes:
    # The raw forms can only stand inside strings, where their escapes mean the same.
    for raw, escaped in _LINE_BREAKERS:
        if raw in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def _without_lone_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _mended(value: Any) -> Any:
    plain = msgspec.to_builtins(value, enc_hook=msgspec.json.decode)  # of `Raw`, which is JSON already
    match plain:
        case str():
            return _without_lone_surrogates(plain)
        case dict():
            return {_mended(key): _mended(item) for key, item in plain.items()}
        case list():
            return [_mended(item) for item in plain]
    return plain
