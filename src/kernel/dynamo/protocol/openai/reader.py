"""Reads a kind of request from a body, and notes the members that it does not have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from dynamo.protocol.openai.body import BodyLimits, check_depth, deserialisation_error, may_nest_deeper, read_json
from dynamo.protocol.openai.foreign_members import is_meaningless

T = TypeVar("T")

MAX_WHOLE_FLOATS: Final = 64  # of one body that are read as integers: each costs another pass over the body

_FLOAT_FOR_INTEGER: Final = re.compile(
    r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$((?:\.[^.\[\]`]+|\[\d+\])+)`"
)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN: Final = "Object contains unknown field"
_UNKNOWN_INSIDE: Final = re.compile(_UNKNOWN + r" `([^`]+)` - at `\$((?:\.[^.\[\]`]+|\[\d+\])+)`")
_NULL: Final = b"null"


def decoder_of(kind: type[T]) -> Callable[[bytes], T]:
    """Return what decodes JSON of a type, with an integer that was sent as `8.0`."""
    strict = msgspec.json.Decoder(kind)

    def decode(body: bytes) -> T:
        try:
            return strict.decode(body)
        except msgspec.ValidationError as error:
            found = amended(body, error, kind)
            if found is None:
                raise
            return found

    return decode


class RequestReader:
    """Decodes one kind of request. The strict decoder notices unknown keys for free; only then is the body read again.

    What other servers' clients write is read for what it means: an integer as `8.0`, and `null` for a member that does not
    exist (libraries write out every member that they know).
    """

    def __init__(self, strict: type[Any], lenient: type[Any]) -> None:
        self._strict_type, self._lenient_type = strict, lenient
        self._strict = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(lenient)
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._fields = frozenset(strict.__struct_fields__)

    def read(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> Any:
        try:
            request, mended = read_json(body, self._decode_any if ignore_unsupported else self._decode, limits)
        except msgspec.ValidationError as error:
            raise deserialisation_error(error) from error
        if may_nest_deeper(body, limits.depth):
            check_depth(request.free_form(), limits.depth)
        if ignore_unsupported and getattr(request, "store", None):
            request.store = None  # an answer that is to be kept, and is not
        if mended:
            request.repaired = True
        return request

    def _decode(self, body: bytes) -> Any:
        try:
            return self._strict.decode(body)
        except msgspec.ValidationError as error:
            if not _is_unknown(error):
                try:
                    found = amended(body, error, self._strict_type)
                except msgspec.ValidationError as further:
                    if not _is_unknown(further):
                        raise
                else:
                    if found is None:
                        raise
                    return found
        request = self._decode_any(body)
        unsupported: list[str] = []
        ignored: list[str] = []
        for key, value in self._keys.decode(body).items():
            if key in self._fields or bytes(value) == _NULL:
                continue
            (ignored if is_meaningless(key, bytes(value)) else unsupported).append(key)
        request.unsupported, request.ignored = tuple(unsupported), tuple(ignored)
        return request

    def _decode_any(self, body: bytes) -> Any:
        try:
            return self._lenient.decode(body)
        except msgspec.ValidationError as error:
            found = amended(body, error, self._lenient_type)
            if found is None:
                raise
            return found


def amended(body: bytes, error: msgspec.ValidationError, kind: type[T]) -> T | None:
    """Return a body with its whole floats as integers, and without the nulls that stand for nothing inside of it.

    None where the first fault is another one. Raises msgspec.ValidationError for a fault behind those.
    """
    value: Any = None
    is_amended = False
    for _ in range(MAX_WHOLE_FLOATS):
        text = str(error)
        whole, unknown = _FLOAT_FOR_INTEGER.match(text), _UNKNOWN_INSIDE.match(text)
        if whole is None and unknown is None:
            break
        if value is None:
            value = msgspec.json.decode(body)
        if not (_make_whole(value, whole[1]) if whole is not None else _drop_null(value, unknown)):
            break
        is_amended = True
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as further:
            error = further
    if is_amended:
        raise error
    return None


def _is_unknown(error: msgspec.ValidationError) -> bool:
    """Return whether the fault is a member of the body itself that does not exist."""
    text = str(error)
    return text.startswith(_UNKNOWN) and " - at `$" not in text


def _make_whole(value: Any, path: str) -> bool:
    """Replace the float at `path` by the integer that it is; False: it is none."""
    steps = _steps(path)
    holder = _at(value, steps[:-1])
    found = _at(holder, steps[-1:])
    if not isinstance(found, float) or not found.is_integer():
        return False
    holder[steps[-1]] = int(found)
    return True


def _drop_null(value: Any, unknown: re.Match[str] | None) -> bool:
    """Remove a member that does not exist and is null; False: it is not."""
    holder = None if unknown is None else _at(value, _steps(unknown[2]))
    if unknown is None or not isinstance(holder, dict) or holder.get(unknown[1], 0) is not None:
        return False
    del holder[unknown[1]]
    return True


def _steps(path: str) -> list[str | int]:
    return [int(index) if index else name for name, index in _STEP.findall(path)]


def _at(value: Any, steps: list[str | int]) -> Any:
    """Return what stands at a place; None: nothing."""
    for step in steps:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value
