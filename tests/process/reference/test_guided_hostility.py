"""Grammars that end, or never end, the process that compiles them: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument, Overloaded
from dynamo.protocol.guided_limits import GuidedLimits, find_excess
from dynamo.reference import guided as guided_module
from dynamo.reference.guided import Guides, GuideSpec, read_guide
from dynamo.reference.loading import Options, load_core
from dynamo.reference.request import Limits
from dynamo.reference.threads import Preparation

LOOSE = GuidedLimits(rules=10**6, references=10**6)


def chained_rules(count: int) -> dict[str, Any]:
    rules = [f"r{number}: r{number + 1}" for number in range(count)]
    return {"grammar": "\n".join(["start: r0", *rules, f'r{count}: "x"'])}


def chained_references(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(count)}
    return {"json": {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "integer"}}}}


KILLERS = [chained_rules(4000), chained_references(3000)]
NAMES = ["rules", "references"]


@pytest.fixture(scope="module")
def directory(speaking_model: Path) -> Path:
    return speaking_model


@pytest.fixture
def guides(directory: Path) -> Iterator[Guides]:
    found = Guides(directory, vocab_size=300, eos_token_ids=[1], compile_seconds=5.0)
    yield found
    found.close()


def spec(guided: dict[str, Any]) -> GuideSpec:
    found = read_guide(guided, LOOSE)
    assert found is not None
    return found


@pytest.mark.parametrize("guided", KILLERS, ids=NAMES)
def test_the_attack_is_real(guided: dict[str, Any], directory: Path) -> None:
    """Else the other tests prove nothing; when llguidance learns to refuse these, look for a harder one."""
    program = (
        "import json, sys, llguidance\n"
        "kind, text, tokenizer = json.load(sys.stdin)\n"
        "matcher = llguidance.LLMatcher\n"
        "grammar = llguidance.grammar_from(kind, text)\n"
        "matcher(llguidance.LLTokenizer(tokenizer), grammar, log_level=0)\n"
    )
    ((kind, text),) = guided.items()
    text = text if isinstance(text, str) else json.dumps(text)
    said = json.dumps(["lark" if kind == "grammar" else kind, text, (directory / "tokenizer.json").read_text()])
    done = subprocess.run([sys.executable, "-c", program], input=said, text=True, capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr


@pytest.mark.parametrize("guided", KILLERS, ids=NAMES)
def test_a_grammar_that_kills_its_compiler_is_refused_and_the_next_one_works(
    guided: dict[str, Any], guides: Guides
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="ends its compiler"):
            guides.guide(spec(guided))
    assert guides.refusals["crash"] == 2
    assert guides.trials == 1, "a known killer is not tried again"
    assert not guides.guide(spec({"regex": "[0-9]"})).is_complete


def test_a_grammar_that_takes_too_long_is_refused(directory: Path) -> None:
    guides = Guides(directory, vocab_size=300, eos_token_ids=[1], compile_seconds=0.001)
    try:
        wide = {"json": {"properties": {f"p{n}": {"enum": [f"{n} {m}" for m in range(40)]} for n in range(200)}}}
        with pytest.raises(InvalidArgument, match=r"takes more than 0\.001 s to compile \(DYN_GUIDED_COMPILE_SECS\)"):
            guides.guide(spec(wide))
        assert guides.refusals["timeout"] == 1
    finally:
        guides.close()


def test_a_compiler_that_died_between_two_grammars_is_replaced(guides: Guides) -> None:
    guides.guide(spec({"regex": "a"}))
    child = guides.trial_process_id
    assert child is not None
    os.kill(child, signal.SIGKILL)
    guides.guide(spec({"regex": "b"}))
    assert guides.trial_process_id not in (None, child)


def test_no_compiler_outlives_its_engine(directory: Path) -> None:
    guides = Guides(directory, vocab_size=300, eos_token_ids=[1], compile_seconds=5.0)
    guides.guide(spec({"regex": "a"}))
    child = guides.trial_process_id
    assert child is not None
    guides.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_refused_grammars_are_remembered_within_a_bound(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided_module, "MAX_REFUSED", 3)
    for number in range(5):
        with pytest.raises(InvalidArgument):
            guides.guide(spec({"regex": "(" * (number + 1)}))
    assert len(guides._refused) == 3


async def test_a_crowd_of_new_grammars_waits_within_a_bound(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(300, 100, (1,))
    preparation = Preparation(directory, limits)
    monkeypatch.setattr("dynamo.reference.threads.MAX_WAITING", 3)
    try:
        crowd = [preparation.compile(spec({"regex": f"a{{{number + 1}}}"})) for number in range(8)]
        outcomes = await asyncio.gather(*crowd, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [Overloaded] * 5
        await preparation.compile(spec({"regex": "a{1}"}))
    finally:
        preparation.close()


LIMITS = GuidedLimits(characters=50, grammar_characters=40, rules=3, references=2, depth=4, brackets=3, nodes=8)
EXCESSES: list[tuple[dict[str, Any], str | None]] = [
    ({"grammar": 'start: a\na: b\nb: "x"'}, None),
    ({"grammar": 'start: a\na: b\nb: c\nc: "x"'}, "guided_rules"),
    ({"grammar": 'root ::= a a ::= b b ::= c c ::= "x"'}, "guided_rules"),
    ({"grammar": "x" * 41}, "guided_characters"),
    ({"regex": "x" * 41}, "guided_characters"),
    ({"regex": "((a)[b])"}, None),
    ({"regex": "((((a))))"}, "guided_brackets"),
    ({"grammar": "(([[x]]))"}, "guided_brackets"),
    ({"json": {"a": {"b": {"c": {}}}}}, None),
    ({"json": {"a": {"b": {"c": {"d": {}}}}}}, "guided_depth"),
    ({"json": '{"a": {"b": {"c": {"d": {}}}}}'}, "guided_depth"),
    ({"json": '{"a": "[[[[[[["}'}, None),
    ({"json": "[" * 50}, "guided_depth"),
    ({"json": {"enum": list(range(8))}}, "guided_nodes"),
    ({"json": {"x" * 51: 1}}, "guided_characters"),
    ({"json": {"const": "x" * 51}}, "guided_characters"),
    ({"json": '"' + "x" * 51 + '"'}, "guided_characters"),
    ({"json": {"$ref": "#", "a": {"$ref": "#"}}}, None),
    ({"json": {"$ref": "#", "a": [{"$ref": "#"}, {"$ref": "#"}]}}, "guided_references"),
    ({"structural_tag": {"format": {"a": {"b": {"c": {"d": 1}}}}}}, "guided_depth"),
    ({"choice": [str(number) for number in range(9)]}, "guided_nodes"),
    ({"choice": ["x" * 60]}, "guided_characters"),
    ({"json": "{"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("guided", "limit"), EXCESSES, ids=range(len(EXCESSES)))
def test_each_bound_refuses_what_exceeds_it_by_one(guided: dict[str, Any], limit: str | None) -> None:
    found = find_excess(guided, LIMITS)
    assert (found and found.limit) == limit
    if found is not None:
        assert "DYN_GUIDED_MAX_" in found.detail


@pytest.mark.parametrize("guided", KILLERS, ids=NAMES)
def test_the_engine_refuses_by_the_bounds_before_it_tries(guided: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidArgument, match=r"sampling_options\.guided_decoding\.(grammar|json) has .*DYN_GUIDED_MAX_"
    ):
        read_guide(guided, GuidedLimits())


def test_the_engine_takes_its_bounds_from_its_options(directory: Path) -> None:
    core = load_core(directory, Options(guided=GuidedLimits(rules=7)))
    assert core.limits.guided.rules == 7
