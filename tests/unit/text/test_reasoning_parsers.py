from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol import parsers as names
from dynamo.text import output_parser
from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tool_set import NO_TOOLS
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.markers import MAX_SEPARATOR
from dynamo.text.output import Content, Joined, JoinedCall, OutputEvent, Reasoning, joined
from dynamo.text.output_parser import OutputParser
from support.cases import each_case
from support.properties import examples


def think(*, starts_inside: bool = False, json_is_content: bool = False) -> TextMachine:
    tags = REASONING_FORMATS["basic"].tags(begins_inside=starts_inside, json_is_content=json_is_content)
    return tagged_machine(None, NO_TOOLS, tags)


def run(parser: TextMachine | OutputParser, pieces: Iterable[str]) -> Joined:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined([*events, *parser.finish()])


@each_case(
    ("text", "content", "reasoning"),
    [
        ("", "", ""),
        ("Hello < world >", "Hello < world >", ""),
        ("<think>a</think>b", "b", "a"),
        ("<think>\n2 + 2\nis 4\n</think>\n\nIt is 4.\n", "It is 4.\n", "2 + 2\nis 4"),
        ("Well, <think>a</think> so", "Well,  so", "a"),
        ("Well,\n<think>a</think>\nso", "Well,\n\nso", "a"),
        ("<think> a </think> so", " so", " a "),
        ("\n\n<think>\r\n a\n\nb \n</think>\n \nso\n", " \nso\n", " a\n\nb "),
        ("\n\nno tag", "\n\nno tag", ""),
        ("<think>a</think>\n<think>b</think>\nc", "c", "ab"),
        ("<think>a</think>b<think>c</think>d", "bd", "ac"),
        ("<think></think>x", "x", ""),
        ("<think>never ends ", "", "never ends "),
        ("x</think> y", "x y", ""),  # a lone closing tag is removed
        ("<think>a <think> b</think>c", "c", "a <think> b"),
        ("<think", "<think", ""),
        ("<think>a</thin", "", "a</thin"),
        ("<thinking>no</thinking>", "<thinking>no</thinking>", ""),
    ],
)
def test_reasoning_with_an_opening_tag(text: str, content: str, reasoning: str) -> None:
    assert run(think(), [text]) == Joined(content, reasoning)


@each_case(
    ("text", "content", "reasoning"),
    [
        ("", "", ""),
        ("a</think>b", "b", "a"),
        ("\n<think>\na\n</think>\nb", "b", "a"),
        ("<thin", "", "<thin"),
        ("\n a \n</think>\n b", " b", " a "),
        ("no end", "", "no end"),
        ("a</think>b<think>c</think>d", "bd", "ac"),
        ('{"a": 1}', "", '{"a": 1}'),
    ],
)
def test_reasoning_that_began_in_the_prompt(text: str, content: str, reasoning: str) -> None:
    assert run(think(starts_inside=True), [text]) == Joined(content, reasoning)


@pytest.mark.parametrize("text", ['{"a": 1}', "[1]"])
def test_guided_json_is_no_reasoning(text: str) -> None:
    parser = think(starts_inside=True, json_is_content=True)
    assert run(parser, ["\n", text]) == Joined(text)
    assert run(think(starts_inside=True, json_is_content=True), ["x</think>", text]) == Joined(text, "x")


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    parser = think()
    assert parser.push("Hi") == [Content("Hi")]
    assert parser.push(" <th") == [Content(" ")]
    assert parser.push("ink>a") == [Reasoning("a")]
    assert parser.is_inside
    assert parser.push("\n</") == []
    assert parser.push("p> b") == [Reasoning("\n</p> b")]
    assert parser.push("</think>") == []
    assert not parser.is_inside
    assert parser.finish() == []


def test_what_is_held_back_is_bounded() -> None:
    parser = think()
    told = 0
    for pushed, char in enumerate("x" + "\n" * 300 + "<think>x" + "\n" * 300 + "</thin" * 40 + "\n" * 300, 1):
        told += sum(len(event.text) for event in parser.push(char) if isinstance(event, Content | Reasoning))
        assert pushed - told <= MAX_SEPARATOR + len("<think>") + len("</think>")


# -- together with tool calls --------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
F = JoinedCall("f", "{}", is_complete=True)
THOUGHT = "<think>\nI should call f.\n</think>\n\n"


def both(*, starts_inside: bool = False, only_first_call: bool = False, fills_content: bool = False) -> OutputParser:
    tags = REASONING_FORMATS["basic"].tags(begins_inside=starts_inside)
    return OutputParser(
        tagged_machine(TOOL_FORMATS["hermes"].call_form, NO_TOOLS, tags),
        only_first_call=only_first_call,
        fills_content=fills_content,
    )


def test_reasoning_is_read_before_tool_calls() -> None:
    assert run(both(), [THOUGHT + CALL]) == Joined("", "I should call f.", [F])
    assert run(both(), [f"<think>{CALL}</think>ok"]) == Joined("ok", CALL)
    assert run(both(), [f"{CALL}<think>b</think>{CALL}"]) == Joined("", "b", [F, F])


def test_only_the_first_call_is_kept_when_asked() -> None:
    assert run(both(only_first_call=True), [f"a{CALL}b{CALL}c"]) == Joined("abc", "", [F])


@each_case(
    ("text", "expected"),
    [
        ("<think>only this", Joined("only this")),
        ("<think>a</think>b", Joined("b", "a")),
        (f"<think>a</think>{CALL}", Joined("", "a", [F])),
        ("plain", Joined("plain")),
    ],
)
def test_reasoning_fills_an_empty_content_when_asked(text: str, expected: Joined) -> None:
    assert run(both(fills_content=True), [text]) == expected
    assert run(both(fills_content=True), text) == expected


def test_very_long_reasoning_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_parser, "MAX_HELD_REASONING", 10)
    text = "<think>" + "x" * 20
    assert run(both(fills_content=True), [text]) == run(both(fills_content=True), text) == Joined("", "x" * 20)


# -- every way of cutting ------------------------------------------------------------------------------------------------

Make = Callable[[], "TextMachine | OutputParser"]

PARSERS: dict[str, Make] = {
    "outside": think,
    "inside": lambda: think(starts_inside=True),
    "guided": lambda: think(starts_inside=True, json_is_content=True),
    "both": both,
    "both inside": lambda: both(starts_inside=True, only_first_call=True),
    "both filling": lambda: both(fills_content=True),
}
every_parser = pytest.mark.parametrize("make", PARSERS.values(), ids=PARSERS.keys())

EXAMPLES = [
    f" x {THOUGHT}{CALL} y",
    " \n<think> a </think> b </think> c <think> d",
    "</</think><<think>></think>",
    ' {"a": 1} </think> [',
]


@every_parser
@pytest.mark.parametrize("text", EXAMPLES)
@pytest.mark.process  # computes for a second and more
def test_two_cuts_anywhere_change_nothing(make: Make, text: str) -> None:
    whole = run(make(), [text])
    assert run(make(), list(text)) == whole
    for i in range(len(text)):
        for j in range(i + 1, min(i + 14, len(text)) + 1):  # a piece longer than every mark is like no cut at all
            assert run(make(), [text[:i], text[i:j], text[j:]]) == whole, (i, j)


@every_parser
@pytest.mark.parametrize("text", ["a<think>b</t", " </think> ", "a</think>b"])
@pytest.mark.process  # computes for a second and more
def test_every_way_of_cutting_a_short_text_changes_nothing(make: Make, text: str) -> None:
    whole = run(make(), [text])
    for chosen in range(1 << (len(text) - 1)):
        cuts = [0, *(place for place in range(1, len(text)) if chosen >> (place - 1) & 1), len(text)]
        assert run(make(), [text[a:b] for a, b in pairwise(cuts)]) == whole, cuts


FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<think",
            "</",
            "think>",
            "<",
            ">",
            " ",
            "\n\n",
            "\n" * MAX_SEPARATOR,
            "{",
            CALL,
            THOUGHT,
            "<tool_call>",
        ]
    ),
    st.text(max_size=8),
)


@every_parser
@examples(40)
@given(text=st.lists(FRAGMENTS, max_size=12).map("".join), data=st.data())
def test_no_text_and_no_cut_changes_the_result(make: Make, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = run(make(), [text])
    assert run(make(), [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert run(make(), text) == whole


# -- formats by name -----------------------------------------------------------------------------------------------------


@each_case(
    ("name", "thinking", "applies", "inside"),
    [
        ("qwen3", None, True, False),
        ("qwen3", False, True, False),
        ("deepseek_r1", None, True, True),
        ("deepseek_r1", False, True, True),
        ("kimi_k25", None, True, True),
        ("kimi_k25", False, False, True),
        ("deepseek_v4", False, False, False),
        ("deepseek_v3_1", None, False, True),
        ("deepseek_v3_1", True, True, True),
    ],
)
def test_when_a_format_applies_and_where_it_begins(
    name: str, thinking: bool | None, applies: bool, inside: bool
) -> None:
    form = REASONING_FORMATS[name]
    assert form.applies(thinking) is applies
    assert form.begins_inside("user: hi\nassistant:") is inside


def test_a_prompt_that_ends_in_the_opening_tag_begins_inside() -> None:
    assert REASONING_FORMATS["qwen3"].begins_inside("<|im_start|>assistant\n<think>\n")
    assert not REASONING_FORMATS["qwen3"].begins_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_names_a_worker_may_advertise_are_those_of_the_parsers() -> None:
    assert set(REASONING_FORMATS) == set(names.REASONING_PARSERS)
