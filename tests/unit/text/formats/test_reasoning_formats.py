"""Every reasoning format: its corpus, whole and cut everywhere, and whatever else comes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import TOOL_FORMATS, unified_parser
from dynamo.text.output import Joined, JoinedCall, OutputEvent, joined
from support.cases import each_case
from support.format_runs import TOOL_SET, cuts_of
from support.format_runs import corpus as tool_corpus
from support.format_writers import WRITERS
from support.reasoning_writers import CORPUS, corpus

CASES = corpus()
NAMES = tuple(CASES)


def run(name: str, pieces: Iterable[str], *, inside: bool = False) -> Joined:
    form = REASONING_FORMATS[name.removesuffix("_s")]
    if form.unified is not None:
        parser = unified_parser(form.unified, TOOL_SET, begins_inside=inside)
    else:
        parser = tagged_machine(None, TOOL_SET, form.tags(begins_inside=inside))
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
    dice = random.Random("prepended")
    for case in CASES["basic"]:
        for pieces in cuts_of(case["text"], dice):
            assert run("minimax_append_think", pieces) == Joined("<think>" + case["text"])


# -- calls in reasoning that was not ended -------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "ping", "arguments": {"a": "</think>"}}\n</tool_call>'
PING = JoinedCall("ping", '{"a": "b"}', is_complete=True)


def reasoned(pieces: Iterable[str], *, tools: str = "hermes", thinks: str = "qwen3") -> Joined:
    tags = REASONING_FORMATS[thinks].tags(begins_inside=True)
    reader = tagged_machine(TOOL_FORMATS[tools].call_form, TOOL_SET, tags)
    events: list[OutputEvent] = []
    for piece in pieces:
        events += reader.push(piece)
    return joined([*events, *reader.finish()])


@each_case(
    ("text", "content", "reasoning", "calls"),
    [
        ("plan {C}", "", "plan ", 1),
        ("plan\n{C}\nmore</think>done", "done", "plan\n\nmore", 1),
        ("plan {C}{C}", "", "plan ", 2),
        ("plan {C}</think>{C}", "", "plan ", 2),
        ("I write <tool_call> and </tool_call>.</think>b", "b", "I write <tool_call> and </tool_call>.", 0),
        ("<tool_call>{'name': 'no_such'}</tool_call></think>b", "b", "<tool_call>{'name': 'no_such'}</tool_call>", 0),
        ('cut <tool_call>{"name": "ping", "argu', "", 'cut <tool_call>{"name": "ping", "argu', 0),
        ('cut <tool_call>{"name": "ping", "arguments": {}', "", 'cut <tool_call>{"name": "ping", "arguments": {}', 0),
    ],
)
def test_a_whole_call_of_a_known_tool_in_reasoning_is_a_call(
    text: str, content: str, reasoning: str, calls: int
) -> None:
    text = text.replace("{C}", CALL.replace("</think>", "b"))
    for pieces in ([text], list(text), *cuts_of(text, random.Random(text))):
        assert reasoned(pieces) == Joined(content, reasoning, [PING] * calls)


def test_a_kimi_call_ends_in_reasoning() -> None:
    text = (
        "plan <|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    for pieces in ([text], list(text)):
        found = reasoned(pieces, tools="kimi_k2", thinks="kimi_k25")
        assert (found.reasoning, found.content) == ("plan ", "")
        assert found.calls == [JoinedCall("ping", "{}", is_complete=True, id="functions.ping:0")]


@pytest.mark.parametrize(
    "name",
    [name for name, one in TOOL_FORMATS.items() if one.call_form is not None and one.call_form.may_stand_in_reasoning],
)
def test_no_cut_changes_what_is_found_in_reasoning(name: str) -> None:
    dice = random.Random(f"inside {name}")
    texts = [case["text"] for case in tool_corpus(next(one for one in (name, "qwen3_coder") if one in WRITERS))]
    for _ in range(10):
        text = "".join(one[: dice.randrange(len(one) + 1)] for one in dice.choices([*texts, "</think>", "\n"], k=3))
        whole = reasoned([text], tools=name)
        for pieces in cuts_of(text, dice):
            assert reasoned(pieces, tools=name) == whole, pieces
