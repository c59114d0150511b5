"""Bounds of what a grammar compiler gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.protocol.guided_limits import GuidedLimits, find_excess

LIMITS = GuidedLimits(references=10, nodes=200, depth=20, brackets=50, rules=20)
REFERENCES: dict[str, Any] = {"anyOf": [{"$ref": "#/a"} for _ in range(11)]}
FEW: dict[str, Any] = {"anyOf": [{"$ref": "#/a"} for _ in range(6)]}


def grammar(*schemas: Any) -> str:
    return "".join(f"r{number}: %json {json.dumps(schema)}\n" for number, schema in enumerate(schemas))


def limit_of(guided: dict[str, Any]) -> str | None:
    found = find_excess(guided, LIMITS)
    return None if found is None else found.limit


def test_a_schema_within_a_grammar_is_held_to_the_bounds_of_schemas() -> None:
    assert limit_of({"grammar": grammar(REFERENCES)}) == "guided_references"
    assert limit_of({"grammar": grammar({"enum": list(range(300))})}) == "guided_nodes"
    assert limit_of({"grammar": "start: %json\n  " + json.dumps(REFERENCES)}) == "guided_references"


def test_schemas_of_one_grammar_count_together() -> None:
    assert limit_of({"grammar": grammar(FEW)}) is None
    assert limit_of({"grammar": grammar(FEW, FEW)}) == "guided_references"


def test_what_is_no_json_behind_the_mark_is_left_to_the_compiler() -> None:
    assert limit_of({"grammar": "start: %json {oops\nb: %json"}) is None


@pytest.mark.parametrize(
    "form", [{"type": "grammar", "grammar": grammar(REFERENCES)}, {"format": [{"json_schema": REFERENCES}]}]
)
def test_grammars_of_a_structural_tag_are_held_to_the_same_bounds(form: dict[str, Any]) -> None:
    assert limit_of({"structural_tag": {"format": form}}) == "guided_references"


@pytest.mark.parametrize("member", ["json", "structural_tag"])
def test_patterns_within_a_schema_are_held_to_the_bounds_of_expressions(member: str) -> None:
    assert limit_of({member: {"a": {"pattern": "(" * 51 + ")" * 51}}}) == "guided_brackets"
    assert limit_of({member: {"a": {"pattern": "(" * 50 + ")" * 50}}}) is None


def test_a_property_with_the_name_of_a_member_is_a_schema() -> None:
    assert limit_of({"json": {"properties": {"pattern": {"type": "string"}, "grammar": {"type": "string"}}}}) is None
