"""The tools of the repository: the table of mutants fits the source, and the figures of the house are what they count."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_a_stay_is_a_run_of_work_in_one_module_and_a_climb_leads_to_a_higher_room() -> None:
    def call(module: str, *, is_work: bool = True) -> SimpleNamespace:
        return SimpleNamespace(module=module, function="f", is_work=is_work)

    way = [
        call("frontend/a"),
        call("protocol/b"),
        call("frontend/a", is_work=False),  # a helper is no stay
        call("protocol/b"),
        call("frontend/a"),
        call("router/c"),
        call("runtime/d"),
        call("router/c"),
    ]
    found = [(stay.module, stay.is_climb) for stay in tool("way").stays(way)]
    assert found == [
        ("frontend/a", False),
        ("protocol/b", False),
        ("frontend/a", True),
        ("router/c", False),
        ("runtime/d", False),
        ("router/c", True),
    ]
