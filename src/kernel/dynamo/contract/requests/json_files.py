"""Reads the JSON files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo.errors import InvalidArgument


def read_object(path: Path, *, items: str | None = None) -> dict[str, Any]:
    """Read a JSON file that holds one object. Raises InvalidArgument naming the file.

    `items`: it holds a list, which becomes the member of that name.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if items is not None and isinstance(value, list):
        return {items: value}
    if not isinstance(value, dict) or items is not None:
        raise InvalidArgument(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
