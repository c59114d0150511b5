"""The operator's own function that decides what of a record may be written."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dynamo.errors import InvalidArgument

Redact = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Gets a record and returns it as it may be written, None: it is not to be written."""


def load_redaction(path: str | None) -> Redact | None:
    """Import the function `module.function`; None for None. Raises InvalidArgument that names what is missing."""
    if path is None:
        return None
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise InvalidArgument(f"DYN_REQUEST_TRACE_REDACT: {path!r} is not the path of a function, module.function")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise InvalidArgument(f"DYN_REQUEST_TRACE_REDACT: {module_name} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidArgument(f"DYN_REQUEST_TRACE_REDACT: {module_name} has no function {name!r}")
    redact: Redact = found
    return redact
