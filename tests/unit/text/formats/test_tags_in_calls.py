"""Tags of reasoning in the arguments of calls are data: every tool format beside every reasoning format."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest

from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS
from dynamo.text.formats.json_calls import named_call, required_calls
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import unified_parser
from dynamo.text.output import CallArguments, Joined, OutputEvent, joined
from support.cases import each_case
from support.format_runs import NAMES, TOOL_SET, cuts_of
from support.format_writers import FORMAT_OF, WRITERS
from support.properties import some_of

TAGS: Final = {
    form.marks: name
    for name, form in reversed(list(REASONING_FORMATS.items()))
    if form.unified is None and not form.prepends
}
"""One reasoning format for each pair of tags; every other one has the same tags."""

CHANNELS: Final = "<|channel|>analysis<|message|>x<|end|>"
UNIFIED: Final = [name for name in NAMES if TOOL_FORMATS[FORMAT_OF.get(name, name)].unified is not None]
TAGGED: Final = [name for name in NAMES if name not in UNIFIED]


def calls_of(writer: str, opening: str, closing: str) -> list[tuple[str, dict[str, Any]]]:
    """Return calls whose arguments are full of tags."""
    texts = [
        f"a {closing} b",
        f"{opening}a{closing}b{opening}",
        f"x\n{closing}\n\ny",
        f"{closing}{closing[:-1]} {opening[1:]}",
    ]
    if writer != "harmony":  # whose own marks no JSON string can keep apart from the end of a message
        texts.append(CHANNELS)
    before = "t " if writer == "minimax_m3_nom" else ""  # in a list it takes a tag that comes first for an element
    return [("run", {"code": text, "values": [before + text]}) for text in texts]


def machine(writer: str, reasoning: str, *, inside: bool = False) -> TextMachine:
    form = TOOL_FORMATS[FORMAT_OF.get(writer, writer)]
    if form.unified is not None:
        return unified_parser(form.unified, TOOL_SET, begins_inside=inside)
    return tagged_machine(form.call_form, TOOL_SET, REASONING_FORMATS[reasoning].tags(begins_inside=inside))


def read(parser: TextMachine, pieces: Iterable[str]) -> Joined:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined([*events, *parser.finish()])


def found_calls(found: Joined) -> list[tuple[str, Any]]:
    assert all(call.is_complete for call in found.calls)
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def halves(text: str) -> Iterator[list[str]]:
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]


@pytest.mark.property
@each_case("writer,tags", list(itertools.product(TAGGED, TAGS)))
def test_tags_in_arguments_are_data_and_tags_around_calls_are_tags(writer: str, tags: tuple[str, str]) -> None:
    opening, closing = tags
    form = WRITERS[writer]
    dice = random.Random(f"{writer} {opening}")
    calls = calls_of(writer, opening, closing)
    text = f"{opening}\nfirst\n{closing}\n\n{form.calls(calls)}"
    content = ""
    if form.can_follow and writer not in ("llama3_json", "default", "phi4"):
        text, content = f"{text}{opening}then{closing} Done.", " Done."
    number = TAGGED.index(writer) + list(TAGS).index(tags)
    for pieces in ([text], *some_of(list(cuts_of(text, dice)), number)):
        found = read(machine(writer, TAGS[tags]), pieces)
        assert (found.content, found.reasoning) == (content, "first" + "then" * bool(content)), pieces
        assert found_calls(found) == calls, pieces


@pytest.mark.property
@each_case("writer", NAMES)
def test_one_cut_anywhere_changes_nothing_where_tags_stand_in_arguments(writer: str) -> None:
    calls = calls_of(writer, "<think>", "</think>")
    text = WRITERS[writer].calls(calls[:2])
    for pieces in some_of(list(halves(text)), NAMES.index(writer)):
        assert found_calls(read(machine(writer, "qwen3"), pieces)) == calls[:2], pieces


@each_case("writer,tags", list(itertools.product(UNIFIED, TAGS)))
def test_tags_of_other_families_in_arguments_of_a_unified_format(writer: str, tags: tuple[str, str]) -> None:
    calls = calls_of(writer, *tags)
    text = WRITERS[writer].calls(calls)
    for pieces in ([text], *cuts_of(text, random.Random(text))):
        found = read(machine(writer, ""), pieces)
        assert (found.content, found.reasoning, found_calls(found)) == ("", "", calls), pieces


REASONED: Final = [
    name
    for name in TAGGED
    if (form := TOOL_FORMATS[FORMAT_OF.get(name, name)].call_form) is not None and form.may_stand_in_reasoning
]


@pytest.mark.property
@each_case("writer,tags", list(itertools.product(REASONED, TAGS)))
def test_tags_in_a_call_that_stands_in_reasoning_are_data(writer: str, tags: tuple[str, str]) -> None:
    opening, closing = tags
    (call,) = calls_of(writer, opening, closing)[:1]
    text = f"plan {WRITERS[writer].calls([call])} more{closing}done"
    number = REASONED.index(writer) + list(TAGS).index(tags)
    for pieces in ([text], *some_of(list(cuts_of(text, random.Random(text))), number)):
        found = read(machine(writer, TAGS[tags], inside=True), pieces)
        assert (found.content, found.reasoning) == ("done", "plan  more"), pieces
        assert found_calls(found) == [call], pieces


@each_case("writer", REASONED)
def test_a_call_in_reasoning_that_is_none_hides_neither_the_closing_tag_nor_what_follows(writer: str) -> None:
    ping = WRITERS[writer].calls([("ping", {})])
    whole = WRITERS[writer].calls([("run", {"code": "abc"})])
    start = whole[: whole.index("abc") + 2]
    text = f"I write {start} or so</think>Now: {ping}"
    whole_answer = read(machine(writer, "qwen3", inside=True), [text])
    for pieces in (list(text), *cuts_of(text, random.Random(text))):
        assert read(machine(writer, "qwen3", inside=True), pieces) == whole_answer, pieces
    calls = found_calls(whole_answer)
    if calls == [("ping", {})]:
        assert (whole_answer.reasoning, whole_answer.content) == (f"I write {start} or so", "Now: ")
    else:  # the next call's marks complete the first: nothing tells that from a call that was meant
        assert [name for name, _ in calls] == ["run"]
        assert "</think>Now" in calls[0][1]["code"]


def test_reading_again_behind_closing_tags_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.text.formats.tagged_answer.MAX_REREAD", 4_000)
    monkeypatch.setattr("dynamo.text.formats.scanner.MAX_CALL_CHARACTERS", 1_000)
    text = "<think><tool_call><function=ping><parameter=a></think>b" * 100
    form = TOOL_FORMATS["qwen3_coder"].call_form
    taken = 0

    reader = tagged_machine(form, TOOL_SET, REASONING_FORMATS["qwen3"].tags())
    scanner = reader._scanner
    real = type(scanner).take

    def take(self: Any, end: int) -> Any:
        nonlocal taken
        at = self.at
        try:
            return real(self, end)
        finally:
            taken += self.at - at

    monkeypatch.setattr(type(scanner), "take", take)
    whole = read(reader, [text])
    assert len(text) <= taken <= len(text) + 4_000 + 1_000
    monkeypatch.undo()
    monkeypatch.setattr("dynamo.text.formats.tagged_answer.MAX_REREAD", 4_000)
    monkeypatch.setattr("dynamo.text.formats.scanner.MAX_CALL_CHARACTERS", 1_000)
    again = tagged_machine(form, TOOL_SET, REASONING_FORMATS["qwen3"].tags())
    assert read(again, list(text)) == whole


# -- forced choices ------------------------------------------------------------------------------------------------------

ARGUMENTS: Final = {"text": "a </think> b <think> c"}


@pytest.mark.parametrize("inside", [False, True])
def test_tags_in_the_json_of_a_forced_choice_are_data(inside: bool) -> None:
    thought = "hm</think>\n\n" if inside else "<think>hm</think>"
    required = thought + json.dumps([{"name": "f", "parameters": ARGUMENTS}])
    named = thought + json.dumps(ARGUMENTS)
    tags = REASONING_FORMATS["qwen3"].tags(begins_inside=inside)
    for text, start in ((required, required_calls(TOOL_SET)), (named, named_call("f"))):
        for pieces in ([text], *halves(text), list(text)):
            found = read(tagged_machine(TOOL_FORMATS["hermes"].call_form, TOOL_SET, tags, start), pieces)
            assert (found.content, found.reasoning, found_calls(found)) == ("", "hm", [("f", ARGUMENTS)]), pieces


def test_arguments_full_of_tags_are_streamed_as_they_come() -> None:
    reader = machine("hermes", "qwen3")
    reader.push('<tool_call>\n{"name": "run", "arguments": {"code": "a')
    assert reader.push(" </think> <think>") == [CallArguments(" </think> <think>")]


@pytest.mark.parametrize("writer", ["default", "pythonic"])
def test_a_tag_among_brackets_that_begin_no_call_is_a_tag(writer: str) -> None:
    for text, content in (
        ("{x}  now[THINK]\na[/THINK]b", "{x}  nowb"),
        ("[[[THINK]a[/THINK]b", "[[b"),
        ("see [1][THINK]a[/THINK]{", "see [1]{"),
    ):
        for pieces in ([text], list(text), *halves(text)):
            assert read(machine(writer, "mistral"), pieces) == Joined(content, "a"), pieces
