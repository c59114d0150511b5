"""A constraint of a request as a grammar that compiles, or a sentence that names the member which does not."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.contract.requests.generation import ConstraintKind, OutputConstraint
from dynamo.contract.requests.output_grammar import grammar_of, is_thinking, read_thought_markers
from dynamo.errors import InvalidArgument
from support.cases import each_case
from support.demo_model import FILES


@each_case(
    "kind, value",
    [
        ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        ("json", True),
        ("regex", "a/b|[/]c"),
        ("choice", ("yes", 'a "quoted" one')),
        ("grammar", 'root ::= "a" | item\nitem ::= [0-9]+ "start"'),
        ("grammar", 'start: "a" | "b"'),
    ],
)
def test_a_constraint_becomes_a_grammar_that_compiles(kind: ConstraintKind, value: Any) -> None:
    for after in (False, True):
        for inside in (False, True):
            assert grammar_of(OutputConstraint(kind, value, None, after), is_thinking=inside).startswith("%llguidance")


@each_case(
    "kind, value",
    [
        ("json", {"type": "nonsense"}),
        ("regex", "(("),
        ("grammar", "root ::= (("),
        ("grammar", "start: nothing"),
        ("structural_tag", {}),
    ],
)
def test_a_constraint_that_does_not_compile_is_named(kind: ConstraintKind, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"guided_decoding.{kind}"):
        grammar_of(OutputConstraint(kind, value))


def test_a_prompt_may_end_inside_thoughts() -> None:
    markers = read_thought_markers(FILES)
    assert markers == (3, 4)
    assert [is_thinking(prompt, markers) for prompt in ([1, 3, 9], [3, 4, 9], [9])] == [True, False, False]
    assert not is_thinking([3], None)
