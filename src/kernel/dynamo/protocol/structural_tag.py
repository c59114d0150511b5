"""The policy of structural tags on a model card: which members it has, and what each may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TAG_SCOPES: Final = ("auto", "always")
TAG_SCHEMAS: Final = ("auto", "strict")

_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "scope": TAG_SCOPES,
    "schema": TAG_SCHEMAS,
    "reasoning_boundary": ("auto", "structural_tag", "backend"),
}
_FLAGS: Final = (
    "allow_tool_calls_with_structured_output",
    "exclude_special_tokens",
    "tool_arguments_any_order",
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "scope": "auto",
    "schema": "auto",
    "allow_tool_calls_with_structured_output": False,
    "reasoning_boundary": "auto",
    "tool_arguments_any_order": False,
}


def check_structural_tag(tag: Mapping[str, Any] | None) -> None:
    """Raises TypeError for what is not an object, and ValueError naming the member that is unknown or wrong."""
    if tag is None:
        return
    if not isinstance(tag, Mapping):
        raise TypeError(f"structural_tag must be a dict or None, got {type(tag).__name__}")
    for name, value in tag.items():
        if name in _WORDS:
            if value not in _WORDS[name]:
                raise ValueError(f"structural_tag.{name} must be one of {', '.join(_WORDS[name])}, got {value!r}")
        elif name in _FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"structural_tag.{name} must be a bool, got {value!r}")
        else:
            raise ValueError(f"structural_tag has no member {name!r}; it has {', '.join((*_WORDS, *_FLAGS))}")


def complete_structural_tag(tag: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Check a policy and fill in the members that it leaves out; None stays None."""
    check_structural_tag(tag)
    return None if tag is None else {**_DEFAULTS, **tag}
