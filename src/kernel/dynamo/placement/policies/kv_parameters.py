"""The parameters of a KV policy, as a file or a flag gives them: checked, with errors that name what is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.placement.kv_query import check_number

P = TypeVar("P", bound=msgspec.Struct)


def read_parameters(kind: str, record: type[P], given: Mapping[str, object]) -> P:
    """Return the parameters of the policy type `kind`.

    Raises InvalidArgument: an unknown name (the message lists the known ones), or a value that its parameter cannot have.
    """
    known = record.__struct_fields__
    for name in given:
        if name not in known:
            raise InvalidArgument(
                f"policy type {kind}: unknown parameter {name!r}; known: {', '.join(known) or 'none'}"
            )
    for name, value in given.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(f"policy type {kind}: parameter {name}", value)
    try:
        return msgspec.convert(dict(given), record)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"policy type {kind}: {error}") from error
