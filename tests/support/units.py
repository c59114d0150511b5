"""Units of systemd, read as far as ours go, and started without it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

UNITS: Final = Path(__file__).parents[2] / "deploy" / "systemd"


def read_unit(name: str, instance: str = "") -> dict[str, list[str]]:
    """Return the values of each key of a unit, in order; the keys of all sections have different names."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().replace("%i", instance).splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def environment(unit: Mapping[str, list[str]], place: Callable[[str], Path]) -> dict[str, str]:
    """Return the variables of a unit, in the order of systemd: files win. `place` leads from a path of the unit to a file here."""
    found = dict(pair.split("=", 1) for line in unit.get("Environment", []) for pair in shlex.split(line))
    for name in unit.get("EnvironmentFile", []):
        path = place(name.removeprefix("-"))
        if not name.startswith("-") or path.exists():
            found |= variables(path.read_text())
    return found


def variables(text: str) -> dict[str, str]:
    """Return the variables of a file of them."""
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def command(unit: Mapping[str, list[str]], env: Mapping[str, str]) -> list[str]:
    """Return the words of what a unit starts. `$NAME` alone becomes several words, or none."""
    words: list[str] = []
    (line,) = unit["ExecStart"]
    for word in shlex.split(line):
        words += env.get(word[1:], "").split() if word.startswith("$") else [word]
    return words
