"""The tools of the repository: the table of mutants fits the source, and the figures of the house are what they count."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_breaks_one_place_that_is_there() -> None:
    mutants = tool("mutants")
    table = mutants.read_table()
    assert mutants.check(table) == []
    assert len(table) >= 25


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        ("Return the sum.", True),
        ("Raise what was kept.", True),
        ("The sum.", False),
        ("How many there are.", False),
        ("Whether it is.", False),
        ("Sums of all.", False),
        ("Waiting for it.", False),
        ("`x` as text.", False),
    ],
)
def test_a_docstring_begins_with_a_verb_or_not(doc: str, expected: bool) -> None:
    assert tool("house").begins_with_verb(doc) is expected
