"""Puts text in the place of what was not recorded, so that a request can be sent again without its content. Pure."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["filled"]

_WORDS: Final = "the quick brown fox jumps over the lazy dog and looks for another place to sleep until the rain ends "
MAX_CHARACTERS: Final = 16 * 1024 * 1024
_GONE: Final[Any] = object()


def filled(shape: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a described body as one that can be sent, and the members that had to be left out.

    A text becomes another one of its length, and equal texts become equal ones; ids become as many ids. Tools, schemas and
    media cannot be made up.
    """
    lost: list[str] = []
    found = _value(shape, "", lost)
    return (found if isinstance(found, dict) else {}), lost


def _value(value: Any, where: str, lost: list[str]) -> Any:
    if isinstance(value, list):
        made = [_value(each, where, lost) for each in value]
        return [each for each in made if each is not _GONE]
    if not isinstance(value, dict):
        return value
    kind = value.get("omitted")
    if kind == "text":
        return _text(int(value.get("characters", 0)), str(value.get("mark", "")))
    if kind == "ids":
        seed = sum(map(ord, str(value.get("mark", ""))))
        return [1 + (seed + place) % 200 for place in range(min(int(value.get("count", 0)), MAX_CHARACTERS))]
    if kind is not None:
        lost.append(where or str(kind))
        return _GONE
    members = {name: _value(each, f"{where}.{name}".lstrip("."), lost) for name, each in value.items()}
    kept = {name: each for name, each in members.items() if each is not _GONE}
    if "type" in kept and len(members) > 1 and set(kept) == {"type"}:
        return _GONE  # a part of a message of which nothing is left
    return kept


def _text(characters: int, mark: str) -> str:
    characters = min(characters, MAX_CHARACTERS)
    text = f"{mark} " + _WORDS * (characters // len(_WORDS) + 1)
    return text[:characters]
