"""What may be assigned to a field of a record: each check returns the value to store, or raises an error that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Any, Final, SupportsIndex

Check = Callable[[str, Any], Any]
"""(name of the field, value assigned) -> value to store."""

U16: Final = 2**16 - 1
U32: Final = 2**32 - 1
U64: Final = 2**64 - 1


def integer(highest: int, *, optional: bool = True) -> Check:
    """Accept an integer in 0..highest, also one of numpy's or torch's."""

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if not isinstance(value, SupportsIndex):
            raise _wrong(name, value, "an integer")
        found = index(value)
        if not 0 <= found <= highest:
            raise OverflowError(f"{name} must be in 0..{highest}, got {found}")
        return found

    return check


def boolean(*, optional: bool = False) -> Check:
    """Accept a bool."""

    def check(name: str, value: Any) -> bool | None:
        if isinstance(value, bool) or (value is None and optional):
            return value
        raise _wrong(name, value, "a bool")

    return check


def text(name: str, value: Any) -> str | None:
    """Accept a str or None."""
    if value is None or isinstance(value, str):
        return value
    raise _wrong(name, value, "a str or None")


def number(name: str, value: Any) -> float | None:
    """Accept a real number or None."""
    if value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    raise _wrong(name, value, "a number or None")


def choice(*words: str) -> Check:
    """Accept one of `words`, None, or an empty text for None."""

    def check(name: str, value: Any) -> str | None:
        found = text(name, value) or None
        if found is not None and found not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
        return found

    return check


def text_mapping(name: str, value: Any) -> dict[str, str]:
    """Accept a mapping of str to str."""
    if isinstance(value, Mapping) and all(isinstance(part, str) for entry in value.items() for part in entry):
        return dict(value)
    raise _wrong(name, value, "a dict of str to str")


def text_set(name: str, value: Any) -> set[str]:
    """Accept a set of str."""
    if isinstance(value, set | frozenset) and all(isinstance(entry, str) for entry in value):
        return set(value)
    raise _wrong(name, value, "a set of str")


def _wrong(name: str, value: Any, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {value!r:.100} ({type(value).__name__})")
