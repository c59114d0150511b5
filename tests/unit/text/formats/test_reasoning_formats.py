"""Every reasoning format: its corpus, whole and cut everywhere, and whatever else comes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from dynamo.text.formats.tools import unified_parser
from dynamo.text.output import Joined, OutputEvent, joined
from dynamo.text.reasoning import REASONING_FORMATS
from support.format_runs import TOOL_SET, cuts_of
from support.reasoning_writers import CORPUS, corpus

CASES = corpus()
NAMES = tuple(CASES)


def run(name: str, pieces: Iterable[str], *, inside: bool = False) -> Joined:
    form = REASONING_FORMATS[name.removesuffix("_s")]
    if form.unified is not None:
        parser: Any = unified_parser(form.unified, TOOL_SET, begins_inside=inside)
    else:
        parser = form.parser(begins_inside=inside)
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("name", NAMES)
def test_every_case_means_what_the_corpus_says(name: str) -> None:
    stored = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(CASES[name]))
    assert len(stored) >= 15
    wrong = []
    for case in stored:
        found = run(name, [case["text"]], inside=case.get("inside", False))
        calls = [[call.name, json.loads(call.arguments)] for call in found.calls]
        if (found.reasoning, found.content, calls) != (case["reasoning"], case["content"], case["calls"]):
            wrong.append((case, found))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", NAMES)
def test_no_cut_changes_the_meaning(name: str) -> None:
    dice = random.Random(f"cuts {name}")
    for case in CASES[name]:
        inside = case.get("inside", False)
        for end in {len(case["text"]), dice.randrange(len(case["text"]) + 1)}:
            text = case["text"][:end]
            whole = run(name, [text], inside=inside)
            for pieces in cuts_of(text, dice):
                assert run(name, pieces, inside=inside) == whole, pieces


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_answers_in_any_order(name: str) -> None:
    dice = random.Random(f"fuzz {name}")
    texts = [case["text"] for case in CASES[name]]
    for _ in range(15):
        text = "".join(
            one[(start := dice.randrange(len(one) + 1)) : start + dice.randrange(40)]
            for one in dice.choices(texts, k=4)
        )
        inside = dice.random() < 0.5
        whole = run(name, [text], inside=inside)
        for pieces in cuts_of(text, dice):
            assert run(name, pieces, inside=inside) == whole, pieces


def test_minimax_append_think_divides_nothing() -> None:
    for text, content in (("a</think>b", "<think>a</think>b"), ("b", "<think>b"), ("", "")):
        assert run("minimax_append_think", [text]) == Joined(content)
        assert run("minimax_append_think", text) == Joined(content)
