"""Readers of what only a worker's settings have: names, endpoints, surfaces, structural tags."""

from __future__ import annotations

import json
from typing import Any, Final

from dynamo.contract.endpoint_name import ENDPOINT_SCHEME, parse_endpoint
from dynamo.protocol.model_types import parse_endpoint_types
from dynamo.protocol.structural_tag import check_structural_tag
from dynamo.settings.readers import FALSY, TRUTHY, SettingReader, read_boolean

__all__ = ["adapter_of", "endpoint_of", "endpoint_types_of", "name_of", "read_structural_tag"]


def _read_name(given: str) -> str:
    """Read a name that can be a part of keys and subjects."""
    name = given.strip()
    if not name or any(character in "./\\" or character.isspace() for character in name):
        raise ValueError(f"{given!r} is not a name: it must not be empty or hold dots, slashes or blanks")
    return name


def _read_endpoint(given: str) -> str:
    """Read an endpoint name, or all three names with their scheme."""
    if not given.startswith(ENDPOINT_SCHEME):
        return _read_name(given)
    return ENDPOINT_SCHEME + ".".join(_read_name(part) for part in parse_endpoint(given))


def _read_endpoint_types(given: str) -> str:
    """Check a comma list of OpenAI surfaces; it stays text."""
    parse_endpoint_types(given)
    return given


def adapter_of(given: str) -> str:
    """Check the name and the source of an adapter, `NAME=PATH` or `NAME=URI`; it stays text. Raises ValueError."""
    name, _, source = given.partition("=")
    if not name or not source:
        raise ValueError(f"{given!r} is no adapter: write NAME=PATH or NAME=URI")
    if "://" in source and not source.startswith(("file:///", "hf://")):
        raise ValueError(f"{given!r}: an adapter comes from a path, file:/// or hf://ORGANISATION/NAME")
    return given


name_of: Final = SettingReader(_read_name)
endpoint_of: Final = SettingReader(_read_endpoint)
endpoint_types_of: Final = SettingReader(_read_endpoint_types)


def read_structural_tag(given: str) -> dict[str, Any] | None:
    """Read true, false or the JSON object of a policy."""
    if given.strip().lower() in TRUTHY | FALSY:
        return {} if read_boolean(given) else None
    try:
        value = json.loads(given)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{given!r} is neither true, false nor a JSON object")
    check_structural_tag(value)
    return value
