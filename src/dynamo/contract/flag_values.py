"""Readers of one flag's or variable's text: each returns the value, or raises ValueError with what to write instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo.contract.endpoint_name import ENDPOINT_SCHEME, parse_endpoint
from dynamo.protocol.model_types import parse_endpoint_types
from dynamo.protocol.structural_tag import check_structural_tag
from dynamo.settings.readers import FALSY, TRUTHY, read_boolean

__all__ = [
    "one_of",
    "read_boolean",
    "read_chaos_plan",
    "read_endpoint",
    "read_endpoint_types",
    "read_name",
    "read_non_negative",
    "read_positive",
    "read_structural_tag",
    "read_template",
    "read_words",
]


def one_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """Make the reader of a word that must be one of `allowed`, in any case."""

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return word

    return read


def read_name(text: str) -> str:
    """Read a name that can be a part of keys and subjects."""
    name = text.strip()
    if not name or any(character in "./\\" or character.isspace() for character in name):
        raise ValueError(f"{text!r} is not a name: it must not be empty or hold dots, slashes or blanks")
    return name


def read_endpoint(text: str) -> str:
    """Read an endpoint name, or all three names with their scheme."""
    if not text.startswith(ENDPOINT_SCHEME):
        return read_name(text)
    return ENDPOINT_SCHEME + ".".join(read_name(part) for part in parse_endpoint(text))


def read_endpoint_types(text: str) -> str:
    """Check a comma list of OpenAI surfaces; it stays text."""
    parse_endpoint_types(text)
    return text


def read_template(text: str) -> str:
    """Read the path of a file that exists."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(f"no such file: {text}")
    return str(path)


def read_chaos_plan(text: str) -> str:
    """Check a plan of fault injection; it stays text."""
    from dynamo.runtime.chaos.admission import check_real  # a worker without a plan does without this
    from dynamo.runtime.chaos.plan import read_plan

    check_real(read_plan(text), text)
    return text


def read_structural_tag(text: str) -> dict[str, Any] | None:
    """Read true, false or the JSON object of a policy."""
    if text.strip().lower() in TRUTHY | FALSY:
        return {} if read_boolean(text) else None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is neither true, false nor a JSON object")
    check_structural_tag(value)
    return value


def read_positive(text: str) -> int:
    """Read an integer above 0."""
    number = int(text) if text.strip().isascii() and text.strip().isdigit() else 0
    if number < 1:
        raise ValueError(f"{text!r} is not a number above 0")
    return number


def read_non_negative(text: str) -> float:
    """Read a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"{text!r} is not a number of at least 0")
    return number


def read_words(text: str) -> list[str]:
    """Split a comma list."""
    return [word for word in (part.strip() for part in text.split(",")) if word]
