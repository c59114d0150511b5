"""Decodes one kind of request, and notes the keys that it does not know."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.protocol.openai.body import BodyLimits, check_depth, deserialisation_error, read_json

__all__ = ["RequestReader"]


class RequestReader:
    """Decodes one kind of request. The strict decoder notices unknown keys for free; only then is the body read again."""

    def __init__(self, strict: type[Any], lenient: type[Any]) -> None:
        self._strict = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(lenient)
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._fields = frozenset(strict.__struct_fields__)

    def read(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> Any:
        try:
            request, mended = read_json(body, self._lenient.decode if ignore_unsupported else self._decode, limits)
        except msgspec.ValidationError as error:
            raise deserialisation_error(error) from error
        check_depth(request.free_form(), limits.depth)
        if mended:
            request.__dict__["repaired"] = True
        return request

    def _decode(self, body: bytes) -> Any:
        try:
            return self._strict.decode(body)
        except msgspec.ValidationError as error:
            text = str(error)
            if not text.startswith("Object contains unknown field") or " - at `$" in text:
                raise
        request = self._lenient.decode(body)
        request.__dict__["unsupported"] = tuple(key for key in self._keys.decode(body) if key not in self._fields)
        return request
