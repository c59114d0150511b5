from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol import parsers as names
from dynamo.text.formats import scanner
from dynamo.text.formats.json_calls import named_call, required_calls
from dynamo.text.formats.json_reader import MAX_DEPTH, JsonReader
from dynamo.text.formats.scanner import TextMachine
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tool_set import NO_TOOLS
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.markers import MAX_SEPARATOR
from dynamo.text.output import CallArguments, CallBegan, CallEnded, Content, Joined, JoinedCall, OutputEvent, joined
from dynamo.text.output_parser import OutputParser
from support.cases import each_case
from support.properties import examples

Make = Callable[[], TextMachine]
HermesParser: Make = TOOL_FORMATS["hermes"].parser

HERMES = TOOL_FORMATS["hermes"].call_form


def required(*, native: bool = False) -> TextMachine:
    return tagged_machine(HERMES if native else None, start=required_calls(NO_TOOLS))


def named(*, native: bool = False) -> TextMachine:
    return tagged_machine(HERMES if native else None, start=named_call("f"))


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F = JoinedCall("f", '{"x": 1}', is_complete=True)


def run(parser: TextMachine, pieces: Iterable[str]) -> Joined:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined([*events, *parser.finish()])


def hermes(text: str) -> Joined:
    return run(HermesParser(), [text])


# -- hermes --------------------------------------------------------------------------------------------------------------


@each_case(
    ("text", "content", "calls"),
    [
        ("Hello <world>", "Hello <world>", []),
        ("  \n", "  \n", []),
        (CALL, "", [F]),
        (f"Let me see.\n{CALL}", "Let me see.\n", [F]),
        (f"{CALL}\nDone.", "\nDone.", [F]),
        (f"First: {CALL} Then", "First:  Then", [F]),
        (f"\n{CALL}\n\n{CALL}\r\n", "", [F, F]),
        (f" {CALL} {CALL} ", "   ", [F, F]),
        (f"{CALL}\n<tool", "\n<tool", [F]),
        (CALL.replace("</tool_call>", "Then"), "\nThen", [F]),
        (f"{CALL}\n{CALL}", "", [F, F]),
        (f"{CALL}{CALL}", "", [F, F]),
        (f"a\n{CALL}\nb\n{CALL}\nc\n", "a\n\nb\n\nc\n", [F, F]),
        ('<tool_call>{"name":"f","parameters":{"x": 1}}</tool_call>', "", [F]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [JoinedCall("f", "{}", is_complete=True)]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [JoinedCall("f", "{}", is_complete=True)]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "id": 7, "arguments": {"x": 1}}', "", [F]),  # the closing tag may be missing
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "f"}',
            "",
            [F, JoinedCall("f", "{}", True)],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}</tool_call>',
            "",
            [JoinedCall("f", '{"x": "</tool_call><tool_call>"}', is_complete=True)],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "a\nb\t"}}</tool_call>',  # raw control characters
            "",
            [JoinedCall("f", '{"x": "a\\u000ab\\u0009"}', is_complete=True)],
        ),
        (
            '<tool_call>{"name": "größe", "arguments": {"ü": "👩‍🚀"}}</tool_call>',
            "",
            [JoinedCall("größe", '{"ü": "👩‍🚀"}', is_complete=True)],
        ),
    ],
)
def test_hermes_reads(text: str, content: str, calls: list[JoinedCall]) -> None:
    assert hermes(text) == Joined(content, "", calls)


@each_case(
    "text",
    [
        "<tool_call>",
        "<tool_call",
        "a\n<tool_call>\n",
        "<tool_call>oops</tool_call>",
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>',
        "<tool_call>{name: 'f'}</tool_call>",
        '<tool_call>{"foo": 1}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>[{"foo": "f"}]</tool_call>',
        "<tool_call>[]</tool_call>",
        "</tool_call>",
        "\n\n  <tool_call> \n <tool_cal> ",
        '<tool_call>{"a":' * 40,
        '<tool_call>{"a":' + '{"a":' * MAX_DEPTH,
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text: str) -> None:
    assert hermes(text) == Joined(text)


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    broken = "<tool_call>{name: 'f'}</tool_call>"
    assert hermes(f"{broken}\n{CALL}") == Joined(f"{broken}\n", "", [F])
    assert hermes(f"{CALL}\n{broken}") == Joined(f"\n{broken}", "", [F])
    assert hermes(f"<tool_call>{CALL}") == Joined("<tool_call>", "", [F])


def test_a_call_is_told_as_it_comes_and_text_at_once() -> None:
    parser = HermesParser()
    assert parser.push("Hi") == [Content("Hi")]
    assert parser.push(' there\n<tool_call>{"name": "f", "arg') == [Content(" there\n")]
    assert parser.push('uments": {"a": "b') == [CallBegan("f"), CallArguments('{"a": "b')]
    assert parser.push('c"}') == [CallArguments('c"}')]
    assert parser.push("}") == [CallEnded()]
    assert parser.push("\n</tool_call>\n") == []
    assert parser.push("!") == [Content("\n!")]


def test_only_so_many_line_breaks_are_a_separator() -> None:
    assert hermes("\n" * MAX_SEPARATOR + CALL) == Joined("", "", [F])
    assert hermes("\n" * (MAX_SEPARATOR + 1) + CALL).content == "\n" * (MAX_SEPARATOR + 1)


def test_a_call_longer_than_the_limit_is_content_unless_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.text.formats.scanner.MAX_CALL_CHARACTERS", 60)
    held = '<tool_call>{"arguments": {"x": "' + "y" * 50 + '"}, "name": "f"}</tool_call>'
    arguments = '{"x": "' + "y" * 50 + '"}'
    told = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    cut_off = JoinedCall("f", arguments[:-2])  # its text is not kept, so what was told of it stays
    for size in (1, 7, len(told)):
        assert run(HermesParser(), pieces(held, size)) == Joined(held)
        assert run(HermesParser(), pieces(told, size)) == Joined("", "", [JoinedCall("f", arguments, is_complete=True)])
        assert run(HermesParser(), pieces(told[: -len('"}}</tool_call>')], size)) == Joined("", "", [cut_off])
    assert hermes(CALL) == Joined("", "", [F])


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_what_is_held_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.text.formats.scanner.MAX_CALL_CHARACTERS", 100)
    parser = HermesParser()
    told = 0
    for pushed, char in enumerate('<tool_call>{"a' * 50 + " " * 500 + '<tool_call>{"' + "x" * 500, 1):
        told += sum(len(event.text) for event in parser.push(char) if isinstance(event, Content))
        assert pushed - told <= 100 + MAX_SEPARATOR + len("<tool_call>")


# -- forced choices ------------------------------------------------------------------------------------------------------

ONE = '{"name": "f", "parameters": {"x": 1}}'


@each_case(
    ("text", "content", "calls"),
    [
        (f"[{ONE}]", "", [F]),
        (f"\n [ {ONE} ,\n{ONE}]\n", "", [F, F]),
        (ONE, "", [F]),
        ('{"name": "f", "arguments": {"x": 1}}', "", [F]),
        ("I would rather not.", "I would rather not.", []),
        (" no", " no", []),
        ("[]", "[]", []),
        ("[1]", "[1]", []),
        ('{"x": 1}', '{"x": 1}', []),
        (f'[{ONE}, {{"name": "g", "par', "", [F, JoinedCall("g")]),
        (f'[{ONE}, {{"name": "g', "", [F]),
        (f"[{ONE},", "", [F]),
        ("[", "", []),
        ('[{"na', "", []),
        ('[{"name": "f", "parameters": {"x": "a\nb', "", [JoinedCall("f", '{"x": "a\\u000ab')]),  # cut off
        ('{"arguments": {"x": 1}, "name": "f"', "", [F]),
        ('{"name": "f", "parameters": {"x": 1}', "", [F]),
        ('{"name": "f", "id": 1', "", [JoinedCall("f")]),
        ('{"x": "cut', '{"x": "cut', []),  # not the beginning of a call
        ('{"name": 1, "x', '{"name": 1, "x', []),
        (f"[{ONE}] and more", " and more", [F]),
        (f"[{ONE}; {ONE}]", f"; {ONE}]", [F]),
    ],
)
def test_a_required_call(text: str, content: str, calls: list[JoinedCall]) -> None:
    assert run(required(), [text]) == Joined(content, "", calls)


@each_case(
    ("text", "expected"),
    [
        ('{"x": 1}', Joined("", "", [F])),
        ('\n{"x": 1}\n', Joined("", "", [F])),
        ("{}", Joined("", "", [JoinedCall("f", "{}", is_complete=True)])),
        ("I would rather not.", Joined("I would rather not.")),
        (" {smile}", Joined(" {smile}")),
        ('{"x"} ', Joined('{"x"} ')),
        ("[1]", Joined("[1]")),
        ('{"x": "ab', Joined("", "", [JoinedCall("f", '{"x": "ab')])),  # cut off by max_tokens
        (' {"x', Joined("", "", [JoinedCall("f", '{"x')])),
        ("{", Joined("", "", [JoinedCall("f", "{")])),
        ('{"x": }', Joined("}", "", [JoinedCall("f", '{"x": ')])),
    ],
)
def test_a_named_call(text: str, expected: Joined) -> None:
    assert run(named(), [text]) == expected


def test_a_named_calls_arguments_arrive_in_pieces() -> None:
    parser = named()
    assert parser.push('{"x"') == []
    assert parser.push(":") == [CallBegan("f"), CallArguments('{"x":')]
    assert parser.push(" [1,") == [CallArguments(" [1")]
    assert parser.push("2]}") == [CallArguments(",2]}"), CallEnded()]
    assert parser.finish() == []


def test_forced_choices_also_read_the_models_own_format() -> None:
    other = CALL.replace('"f"', '"g"')
    assert run(required(native=True), [f"{CALL}\n{other}"]).calls == [
        F,
        JoinedCall("g", '{"x": 1}', True),
    ]
    reader = OutputParser(named(native=True), only_function="f")
    assert joined([*reader.push(f"\n{other}{CALL}"), *reader.finish()]) == Joined("", "", [F])
    assert run(named(native=True), ["oh no"]) == Joined("oh no")


@each_case(
    ("length", "expected"),
    [
        (len('<tool_call>\n{"na'), Joined()),
        (len('<tool_call>\n{"name": "f"'), Joined("", "", [JoinedCall("f")])),
        (len('<tool_call>\n{"name": "f", "arguments": {"x"'), Joined("", "", [JoinedCall("f", '{"x"')])),
        (len('<tool_call>\n{"name": "f", "arguments": {"x": 1}'), Joined("", "", [F])),
    ],
)
def test_a_forced_call_in_the_models_own_format_that_is_cut_off_is_what_there_is_of_it(
    length: int, expected: Joined
) -> None:
    assert run(required(native=True), [CALL[:length]]) == expected
    assert run(named(native=True), [CALL[:length]]) == expected
    is_whole = expected.calls == [F]  # closing marks may be missing
    assert hermes(CALL[:length]) == (expected if is_whole else Joined(CALL[:length]))  # a call that only may come


# -- every way of cutting ------------------------------------------------------------------------------------------------

PARSERS: dict[str, Make] = {
    "hermes": HermesParser,
    "required": required,
    "required hermes": lambda: required(native=True),
    "named": lambda: named(),
    "named hermes": lambda: named(native=True),
}
every_parser = pytest.mark.parametrize("make", PARSERS.values(), ids=PARSERS.keys())

EXAMPLES = [
    '[{"name": "f", "parameters": {"x": "a',
    f"Hi \n {CALL} \n{CALL} bye ",
    '<tool_call>{"name": "f", "arguments": {"a": ["\\u00e9\n", -1.5e+3, true, null, {}]}} </tool_cal> x',
    "a <<tool_call><tool_call> {</tool_call",
    f" [ {ONE} , {ONE} ] z",
    ' {"x": {"y": "<tool_call>"}} tail',
    "<tool_call>\n" + '{"name": "g"}' + "</tool_call> [",
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
@pytest.mark.parametrize(
    "text", ['<tool_call>{"name":"f"}</tool_call>', "<<tool_call>{", '[{"name":"f"}, x', '{"x":1} y']
)
def test_every_way_of_cutting_a_short_text_changes_nothing(make: Make, text: str) -> None:
    # The first eight places that matter, in all 256 combinations: around the tags' ends and the brackets.
    places = [at for at in range(1, len(text)) if not (text[at - 1 : at + 1].isalpha())][:8]
    whole = run(make(), [text])
    for chosen in range(1 << len(places)):
        cuts = [0, *(place for bit, place in enumerate(places) if chosen >> bit & 1), len(text)]
        assert run(make(), [text[a:b] for a, b in pairwise(cuts)]) == whole, cuts


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "call>",
            "<",
            "\n",
            "\n" * MAX_SEPARATOR,
            "  ",
            "{",
            "}",
            "[",
            "]",
            ",",
            '"',
            "\\",
            ":",
            '{"name": "f"',
            '"arguments": {',
        ]
    ),
    st.text(max_size=8),
    OBJECTS.map(json.dumps),
    OBJECTS.map(lambda arguments: json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)),
    OBJECTS.map(lambda arguments: f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments})}\n</tool_call>"),
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)


def cut(data: st.DataObject, text: str) -> Sequence[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@every_parser
@examples(40)
@given(text=TEXTS, data=st.data())
def test_no_text_and_no_cut_changes_the_result(make: Make, text: str, data: st.DataObject) -> None:
    whole = run(make(), [text])
    assert run(make(), cut(data, text)) == whole
    assert run(make(), text) == whole


@examples(40)
@given(text=TEXTS)
def test_text_without_a_call_passes_unchanged(text: str) -> None:
    found = hermes(text)
    if not found.calls:
        assert found.content == text


@examples(40)
@given(arguments=OBJECTS, before=st.text(max_size=5), after=st.text(max_size=5))
def test_every_call_survives_the_way(arguments: dict[str, Any], before: str, after: str) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    found = hermes(f"{before}<tool_call>\n{call}\n</tool_call>{after}")
    assert [json.loads(one.arguments) for one in found.calls] == [arguments]
    assert found.content == (before if before.strip("\r\n") else "") + (after if after.strip("\r\n") else "")
    assert json.loads(run(named(), [json.dumps(arguments)]).calls[0].arguments) == arguments


# -- the object reader ---------------------------------------------------------------------------------------------------


@examples(200)
@given(
    text=st.one_of(OBJECTS.map(json.dumps), st.text('{}[]",:\\ 0123456789.eE+-truefalsn', max_size=14).map("{".__add__))
)
def test_the_reader_agrees_with_json(text: str) -> None:
    reader = JsonReader()
    end, read = reader.read(text)
    try:
        value, length = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:  # more lenient, but what comes out is JSON
        assert not reader.is_complete or isinstance(json.loads(read), dict)
    else:
        assert reader.is_complete
        assert end == length
        assert read == text[:length] or "inf" in repr(value)


@each_case(
    "text",
    [
        '{"a": 01}',
        '{"a": .5}',
        '{"a": 1.}',
        '{"a": +1}',
        '{"a" 1}',
        "{,}",
        '{"\\x": 1}',
        '{"\\u12g4": 1}',
        "x",
        '{"a": tru}',
    ],
)
def test_the_reader_says_at_once_that_it_is_none(text: str) -> None:
    reader = JsonReader()
    reader.read(text)
    assert reader.is_broken


# -- names ---------------------------------------------------------------------------------------------------------------


def test_the_names_a_worker_may_advertise_are_those_of_the_parsers() -> None:
    assert set(TOOL_FORMATS) == set(names.TOOL_PARSERS)
    assert scanner.MAX_CALL_CHARACTERS == 1024 * 1024
