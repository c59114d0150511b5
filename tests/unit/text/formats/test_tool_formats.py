"""Every tool-call format: its corpus, whole and cut everywhere, and what is left of it when it ends anywhere."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.text.formats import TOOL_FORMATS
from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.output import Content
from dynamo.text.output_parser import OutputParser
from support.cases import each_case
from support.format_runs import NAMES, assert_is_consistent, corpus, cuts_of, fuzz, meaning, parser, run, token_pieces
from support.format_writers import CORPUS, FORMAT_OF, WRITERS, cases, random_arguments
from support.properties import examples, some_of


def test_every_format_has_a_writer() -> None:
    written = [TOOL_FORMATS[FORMAT_OF.get(name, name)] for name in WRITERS]
    assert [name for name, form in TOOL_FORMATS.items() if form not in written] == []


@each_case("name", NAMES)
def test_the_corpus_is_what_its_writer_says(name: str) -> None:
    generated: list[dict[str, Any]] = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    assert generated == json.loads(json.dumps(cases(WRITERS[name])))
    assert len(corpus(name)) >= 15


@each_case("name", NAMES)
def test_every_case_means_what_the_corpus_says(name: str) -> None:
    wrong = []
    for case in corpus(name):
        found = run(name, [case["text"]])
        expected = (case["content"], case.get("reasoning", ""), case["calls"])
        if meaning(found) != expected or not all(call.is_complete for call in found.calls):
            wrong.append((case["name"], case["text"], expected, found))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.property
@each_case("name", NAMES)
def test_no_cut_changes_the_meaning(name: str) -> None:
    dice = random.Random(f"cuts {name}")
    for case in some_of(corpus(name), NAMES.index(name)):
        whole = run(name, [case["text"]])
        for pieces in cuts_of(case["text"], dice):
            assert run(name, pieces) == whole, pieces


@pytest.mark.property
@each_case("name", NAMES)
def test_one_cut_anywhere_changes_nothing_where_marks_stand_in_a_string(name: str) -> None:
    (text,) = [case["text"] for case in corpus(name) if case["name"] == "marks in a string"]
    whole = run(name, [text])
    for place in some_of(range(len(text)), NAMES.index(name)):
        assert run(name, [text[:place], text[place:]]) == whole, text[:place]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.process  # computes for seconds
def test_two_cuts_anywhere_change_nothing(name: str) -> None:
    for case in corpus(name):
        text = case["text"]
        whole = run(name, [text])
        for i in range(len(text)):
            assert run(name, [text[:i], text[i:]]) == whole, (text[:i], text[i:])
            assert run(name, [text[:i], text[i : i + 3], text[i + 3 :]]) == whole, (text[:i], text[i : i + 3])


@each_case("name", NAMES)
def test_an_end_anywhere_loses_nothing_and_breaks_nothing(name: str) -> None:
    for case in corpus(name)[::6]:
        text = case["text"]
        for end in range(0, len(text), 5):
            assert_is_consistent(name, text[:end], [text[:end]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.process  # computes for seconds
def test_an_end_at_every_character_of_every_case(name: str) -> None:
    for case in corpus(name):
        text = case["text"]
        for end in range(len(text)):
            assert_is_consistent(name, text[:end], list(text[:end]))


@each_case("name", NAMES)
def test_pieces_of_calls_in_any_order(name: str) -> None:
    fuzz(name, 12)


PIECES = (
    "<",
    "[",
    "{",
    "}",
    "]",
    "\n",
    " ",
    ",",
    '"',
    "a",
    "ping",
    "()",
    '{"name": "ping", "arguments": {}}',
    "[ping()]",
)


@examples(150)
@given(name=st.sampled_from(sorted(TOOL_FORMATS)), thinks=st.sampled_from(sorted(REASONING_FORMATS)), data=st.data())
def test_no_text_and_no_cut_changes_what_a_pair_of_formats_reads(name: str, thinks: str, data: st.DataObject) -> None:
    form, tags = TOOL_FORMATS[name], REASONING_FORMATS[thinks].tags(begins_inside=data.draw(st.booleans()))
    marks = (*form.marks, *tags.openings, *tags.closings, *tags.frame)
    pieces = st.sampled_from([*PIECES, *filter(None, marks)]) | st.text(max_size=4)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = run(name, [text], tags)
    assert run(name, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)], tags) == whole
    assert run(name, text, tags) == whole


@each_case("name", NAMES)
def test_what_a_family_writes_is_read_back(name: str) -> None:
    dice = random.Random(f"round trip {name}")
    for _ in range(8):
        calls = [("run", random_arguments(dice, empty=WRITERS[name].empty)) for _ in range(dice.randrange(1, 3))]
        found = run(name, token_pieces(WRITERS[name].calls(calls)))
        assert meaning(found) == ("", "", [list(call) for call in calls])


@pytest.mark.parametrize("name", NAMES)
def test_floods_are_read_in_linear_time(name: str) -> None:
    for mark in ("<", "[", "{", WRITERS[name].begin):
        text = mark * (3_000 // len(mark))
        found = run(name, [text[at : at + 512] for at in range(0, len(text), 512)])
        assert len(found.content) <= len(text)


def test_a_mark_that_opens_no_tag_costs_the_same_in_a_long_text() -> None:
    looked_at: list[int] = []

    class Watched(str):
        def find(self, part: str, start: int, end: int | None = None) -> int:  # type: ignore[override]
            looked_at.append((len(self) if end is None else min(end, len(self))) - start)
            return super().find(part, start, end)

    machine = TOOL_FORMATS["kimi_k3"].parser()
    machine.push(Watched("<|open|>x" * 1_000))
    assert looked_at
    assert max(looked_at) < 1_000


def calls_of(reader: OutputParser, text: str) -> list[str]:
    """Return the names of the functions that run when plain text is pushed."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        events = reader.push(text)
    finally:
        sys.setprofile(None)
    assert events == [Content(text)]
    return calls


def test_plain_text_passes_without_a_call_into_the_parsers() -> None:
    for name in NAMES:
        reader = OutputParser(parser(name, REASONING_FORMATS["qwen3"].tags()))
        reader.push("Plain")
        calls = calls_of(reader, " text")
        assert calls[:1] == ["push"]
        assert not {"search", "_run", "_behind_reasoning"}.intersection(calls), name


def test_ten_megabytes_of_one_character_take_less_than_a_second() -> None:
    text = "<" * 65_536
    reader = OutputParser(parser("hermes", REASONING_FORMATS["qwen3"].tags(begins_inside=True)))
    began = time.process_time()
    for _ in range(160):
        reader.push(text)
    assert time.process_time() - began < 1  # it takes a twentieth of that
