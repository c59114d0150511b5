"""A form (`multipart/form-data`) as the JSON body with the same members, in which a file is a data URL.

So there is one decoder and one set of rules for a request, whichever way it came.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.protocol.openai.errors import RequestRejected

_NESTED: Final = re.compile(r"([A-Za-z0-9_]+)\[([A-Za-z0-9_]+)\]")
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,17})?")
_WORDS: Final = {"true": True, "True": True, "false": False, "False": False}


class FormFile(Struct):
    """A file of a form."""

    name: str  # of the field
    data: bytearray
    media_type: str = "application/octet-stream"  # as its first bytes show


class FormShape(Struct, frozen=True):
    """What the fields of one kind of form are. A field that is not named is text."""

    files: frozenset[str] = frozenset()  # may hold a file; a text there is a URL
    lists: frozenset[str] = frozenset()  # may come several times, as `name` or `name[]`
    numbers: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()


def form_body(fields: Sequence[tuple[str, str]], files: Sequence[FormFile], shape: FormShape) -> bytes:
    """Return the body. `fields`: name and text, in the order of the form; of each name texts go before files.

    Raises RequestRejected (400) that names the field.
    """
    members: dict[str, Any] = {}
    for given, text in fields:
        nested = _NESTED.fullmatch(given)
        if nested is not None:
            _set(members.setdefault(nested[1], {}), nested[2], _free(text), given)
            continue
        name = given.removesuffix("[]")
        value = _value(name, text, shape)
        if name in shape.lists:
            members.setdefault(name, []).append(value)
        else:
            _set(members, name, value, given)
    for file in files:
        name = file.name.removesuffix("[]")
        if name not in shape.files:
            raise refused_form(f"The form has a file in the field '{name[:64]}', which takes none", name[:64])
        url = msgspec.Raw(
            b'"data:%b;base64,%b"' % (file.media_type.encode(), binascii.b2a_base64(file.data, newline=False))
        )
        file.data = bytearray()  # it may have megabytes, and is needed no longer
        if name in shape.lists:
            members.setdefault(name, []).append(url)
        else:
            _set(members, name, url, name)
    return msgspec.json.encode(members)


def refused_form(message: str, param: str | None = None) -> RequestRejected:
    """Return the 400 for a form."""
    return RequestRejected(400, message, param=param, stream_type="invalid_request_error")


def _set(members: Any, name: str, value: Any, given: str) -> None:
    if not isinstance(members, dict) or name in members:
        raise refused_form(f"The form has the field '{given[:64]}' twice", given[:64])
    members[name] = value


def _value(name: str, text: str, shape: FormShape) -> Any:
    if name in shape.numbers and _NUMBER.fullmatch(text):
        return msgspec.Raw(text.encode())
    if name in shape.switches and text in _WORDS:
        return _WORDS[text]
    if name == "nvext":
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise refused_form(f"The field '{name}' is not valid JSON: {error}", name) from None
    return text


def _free(text: str) -> Any:
    """Return the value of a member whose kind only the decoder knows."""
    if _NUMBER.fullmatch(text):
        return msgspec.Raw(text.encode())
    return _WORDS.get(text, text)
