"""The input of a custom tool, out of the arguments of the function that stands for it."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dynamo.protocol.responses.tools import CUSTOM_INPUT

__all__ = ["custom_input"]

_BEGINNING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_BROKEN_END: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_LONE_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def custom_input(arguments: str) -> str:
    """Return the input that arguments hold; of arguments that were cut off, as much as there is.

    A model that wrote something else than the one argument is taken at its word: the text of its only string, or all of it.
    """
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _cut_off(arguments)
    if isinstance(value, dict):
        if isinstance(found := value.get(CUSTOM_INPUT), str):
            return found
        if len(value) == 1 and isinstance(only := next(iter(value.values())), str):
            return only
    return value if isinstance(value, str) else arguments


def _cut_off(arguments: str) -> str:
    began = _BEGINNING.match(arguments)
    if began is None:
        return arguments
    text = arguments[began.end() :]
    for broken in (None, _BROKEN_END, _LONE_HALF):
        if broken is not None:
            text = broken.sub("", text)
        try:
            return msgspec.json.decode(b'"%b"' % text.encode(errors="replace"), type=str)
        except (msgspec.DecodeError, UnicodeError):
            continue
    return arguments
