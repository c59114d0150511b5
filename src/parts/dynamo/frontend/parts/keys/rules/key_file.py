"""Key files as text: TOML or JSON to a `KeyRing`, and one key of a file added, changed or removed.

A change touches the lines of one key and leaves the rest of a TOML file, its comments included, as it is. The result is
read again before it replaces the old one: a file that cannot be changed in this way is refused, never damaged.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from typing import Final

import msgspec

from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing

_HEADER: Final = re.compile(r"^\s*\[\[\s*keys\s*\]\]", re.MULTILINE)
_TABLE: Final = re.compile(r"^\s*\[(?!\[?\s*keys\s*[.\]])", re.MULTILINE)
_PLACE: Final = re.compile(r"`\$\.keys\[(\d+)\]")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class KeyFileError(ValueError):
    """A key file that cannot be read, or not be changed; the message names the line where it is known."""


def read_key_ring(text: str, *, is_json: bool) -> KeyRing:
    """Return what a file holds. Raises KeyFileError; a text of blanks is an error, as a file is while it is written."""
    if not text.strip():
        raise KeyFileError("the file is empty; a file without any key says `keys = []`")
    try:
        plain = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # both decoders' own errors are ValueErrors that name the line
        raise KeyFileError(str(error)) from None
    try:
        return msgspec.convert(plain, KeyRing)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{_line_of(str(error), text, is_json=is_json)}{error}") from None


def _line_of(message: str, text: str, *, is_json: bool) -> str:
    """Return "line N: " where the message names a key of a TOML file."""
    place = _PLACE.search(message)
    if is_json or place is None:
        return ""
    starts = [found.end() for found in _HEADER.finditer(text)]
    number = int(place[1])
    return "" if number >= len(starts) else f"line {text.count(chr(10), 0, starts[number]) + 1}: "


def add_key(text: str, record: KeyRecord, *, is_json: bool) -> str:
    """Return the text with one more key at its end; an empty text becomes a file."""
    if not text.strip():
        text = '{"keys": []}' if is_json else ""
        before = KeyRing()
    else:
        before = read_key_ring(text, is_json=is_json)
    expected = _with(before, (*before.keys, record))
    if is_json:
        return _as_json(expected, text)
    text = re.sub(r"^\s*keys\s*=\s*\[\s*\]\s*$", "", text, flags=re.MULTILINE)
    gap = "" if not text.strip() else "\n" if text.endswith("\n") else "\n\n"
    return _checked(f"{text if text.strip() else ''}{gap}{key_toml(record)}", expected)


def replace_key(text: str, record: KeyRecord, *, is_json: bool) -> str:
    """Return the text with this key in place of the one with its id. Raises KeyFileError where there is none."""
    before = read_key_ring(text, is_json=is_json)
    place = _place_of(before, record.id)
    expected = _with(before, (*before.keys[:place], record, *before.keys[place + 1 :]))
    if is_json:
        return _as_json(expected, text)
    start, end = _span(text, place)
    return _checked(text[:start] + key_toml(record) + _rest(text[start:end]) + text[end:], expected)


def remove_key(text: str, id: str, *, is_json: bool) -> str:
    """Return the text without the key of this id. Raises KeyFileError where there is none."""
    before = read_key_ring(text, is_json=is_json)
    place = _place_of(before, id)
    expected = _with(before, (*before.keys[:place], *before.keys[place + 1 :]))
    if is_json:
        return _as_json(expected, text)
    start, end = _span(text, place)
    rest = text[:start] + _rest(text[start:end]).lstrip("\n") + text[end:]
    if not expected.keys:
        rest = "keys = []\n" + rest
    return _checked(rest, expected)


def _with(ring: KeyRing, keys: tuple[KeyRecord, ...]) -> KeyRing:
    try:
        return msgspec.convert({**msgspec.to_builtins(ring), "keys": msgspec.to_builtins(keys)}, KeyRing)
    except msgspec.ValidationError as error:
        raise KeyFileError(str(error)) from None


def _place_of(ring: KeyRing, id: str) -> int:
    for place, record in enumerate(ring.keys):
        if record.id == id:
            return place
    raise KeyFileError(f"there is no key with the id {id!r}")


def _span(text: str, place: int) -> tuple[int, int]:
    """Return where the tables of one key begin and end."""
    starts = [found.start() for found in _HEADER.finditer(text)]
    if place >= len(starts):
        raise KeyFileError("this file does not write its keys as [[keys]] tables: change it by hand")
    start = starts[place]
    start += len(text[start:]) - len(text[start:].lstrip())
    ends = [found.start() for found in _HEADER.finditer(text, start + 1)]
    ends += [found.start() for found in _TABLE.finditer(text, start + 1)]
    return start, min(ends, default=len(text))


def _rest(block: str) -> str:
    """Return the comments and blank lines behind the last entry of a block: they belong to what follows."""
    lines = block.splitlines(keepends=True)
    kept: list[str] = []
    while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        kept.append(lines.pop())
    return "".join(reversed(kept))


def _checked(text: str, expected: KeyRing) -> str:
    try:
        found = read_key_ring(text, is_json=False)
    except KeyFileError as error:
        raise KeyFileError(f"this file cannot be changed by a command, change it by hand ({error})") from None
    if found != expected:
        raise KeyFileError("this file cannot be changed by a command without changing other keys: change it by hand")
    return text


def _as_json(ring: KeyRing, text: str) -> str:
    plain = msgspec.to_builtins(ring)
    plain["keys"] = [msgspec.to_builtins(record) for record in ring.keys]
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


# -- TOML of one record ----------------------------------------------------------------------------------------------


def key_toml(record: KeyRecord) -> str:
    """Write a key as a `[[keys]]` table."""
    plain: dict[str, object] = msgspec.to_builtins(record, builtin_types=(datetime,))
    return "".join(_tables(plain, "keys", "[[keys]]"))


def _tables(members: Mapping[str, object], path: str, header: str) -> Iterator[str]:
    yield f"{header}\n"
    inner = {}
    for name, value in members.items():
        if isinstance(value, Mapping):
            inner[name] = value
        else:
            yield f"{_toml_key(name)} = {_toml_value(value)}\n"
    for name, value in inner.items():
        deeper = f"{path}.{_toml_key(name)}"
        yield from _tables(value, deeper, f"\n[{deeper}]")


def _toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case datetime() | date():
            return value.isoformat()
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    """Write a basic string of TOML: JSON's escapes are among its own."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
