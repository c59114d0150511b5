"""Calls that must come, with every format: as guided JSON and in the format's own form, whole and cut off anywhere."""

from __future__ import annotations

import itertools
import json
from typing import Any, Final

import pytest

from dynamo.frontend.pipeline.parsing import OutputPlan, plan_output
from dynamo.protocol.openai.chat_options import chat_options
from dynamo.protocol.openai.requests import parse_chat
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.text import ByteTokenizer
from dynamo.text.formats import REASONING_FORMATS, TOOL_FORMATS
from dynamo.text.output import Joined, OutputEvent, joined
from support.cases import each_case
from support.format_runs import NAMES
from support.format_writers import FORMAT_OF, TOOLS, WRITERS
from support.properties import IN_TEST_ALL, share, some_of

ARGUMENTS: Final = {"query": 'red "shoes" </think> [1]', "filters": {"a": [1, 2.5]}}
FIND: Final[tuple[str, Any]] = ("find", ARGUMENTS)
PING: Final[tuple[str, Any]] = ("ping", {})
NAMED: Final = {"type": "function", "function": {"name": "find"}}
CHOICES: Final = {"required": "required", "named": NAMED}
UNIFIED_REASONING: Final = {"harmony": "gpt_oss", "inkling": "inkling", "kimi_k3": "kimi_k3", "muse": "muse"}


def plan(writer: str, choice: Any, *, prompt: str = "user: hi\nassistant:", **fields: Any) -> OutputPlan:
    tools = FORMAT_OF.get(writer, writer)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
    config = ModelRuntimeConfig(tool_call_parser=tools, reasoning_parser=UNIFIED_REASONING.get(tools, "qwen3"))
    options = chat_options(parse_chat(json.dumps({**body, **fields}).encode()))
    found = plan_output(options, config, prompt=prompt, tokenizer=ByteTokenizer(), prompt_ids=[])
    assert found is not None
    return found


def read(made: OutputPlan, pieces: Any, *, is_cut: bool = False) -> Joined:
    parser = made.parser()
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined([*events, *parser.finish(is_cut=is_cut)])


def guided(choice: str, *calls: tuple[str, Any]) -> str:
    if choice == "named":
        return json.dumps(calls[0][1])
    return json.dumps([{"name": name, "parameters": given} for name, given in calls])


def thought(writer: str) -> str:
    """Return reasoning and what comes between it and the answer."""
    return {
        "harmony": "<|channel|>analysis<|message|>hm<|end|>",
        "inkling": "<|content_thinking|>hm<|end_message|>",
        "kimi_k3": "<|open|>think<|sep|>hm<|close|>think<|sep|>",
        "muse": "<|start|>assistant to=self<|message|>hm<|eom|>",
    }.get(writer, "<think>\nhm\n</think>\n\n")


def around(writer: str, text: str) -> list[str]:
    """Return the ways in which a model may write guided text."""
    own = {
        "harmony": [f"<|channel|>final<|message|>{text}<|return|>", f"<|channel|>final<|message|>{text}"],
        "inkling": [f"<|content_text|>{text}<|end_message|>"],
        "kimi_k3": [f"<|open|>response<|sep|>{text}<|close|>response<|sep|><|end_of_msg|>"],
        "muse": [f"<|start|>assistant to=user<|message|>{text}<|eot|>"],
    }
    return [text, *own.get(writer, [])]


@each_case("writer,choice", list(itertools.product(NAMES, CHOICES)))
def test_guided_json_is_calls_with_every_format(writer: str, choice: str) -> None:
    made = plan(writer, CHOICES[choice])
    calls = [FIND] if choice == "named" else [FIND, PING]
    for text in around(writer, guided(choice, *calls)):
        for reasoning, whole in (("", text), ("hm", thought(writer) + text)):
            for pieces in ([whole], list(whole)):
                found = read(made, pieces)
                assert (found.content, found.reasoning) == ("", reasoning), whole
                assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, whole
                assert all(call.is_complete for call in found.calls)


@each_case("writer,choice", list(itertools.product(NAMES, CHOICES)))
def test_the_formats_own_form_is_read_after_a_forced_choice(writer: str, choice: str) -> None:
    made = plan(writer, CHOICES[choice])
    text = WRITERS[writer].calls([PING, FIND])
    for whole in (text, thought(writer) + text):
        for pieces in ([whole], list(whole)):
            found = read(made, pieces)
            assert (found.content, found.reasoning) == ("", "hm" if whole != text else "")
            calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
            assert calls == ([FIND] if choice == "named" else [PING, FIND])


def ends(text: str, writer: str) -> list[int]:
    """Return where a text is cut off: anywhere, and in `make test` at a tenth of the places and before the last character."""
    return sorted({*some_of(range(len(text)), NAMES.index(writer), enough=IN_TEST_ALL), len(text) - 1})


@pytest.mark.property
@each_case("writer,choice", list(itertools.product(NAMES, CHOICES)))
def test_a_forced_call_that_is_cut_off_anywhere_is_what_there_is_of_it_and_never_text(writer: str, choice: str) -> None:
    made = plan(writer, CHOICES[choice])
    whole = json.dumps(ARGUMENTS)
    for text in (*around(writer, guided(choice, FIND)), thought(writer) + guided(choice, FIND)):
        longest, by_character = 0, set(some_of(range(len(text)), NAMES.index(writer)))
        for end in ends(text, writer):
            found = read(made, [text[:end]], is_cut=True)
            if end in by_character:
                assert read(made, list(text[:end]), is_cut=True) == found
            assert not found.content, text[:end]
            assert len(found.calls) <= 1
            for call in found.calls:
                assert call.name == "find"
                assert whole.startswith(call.arguments), text[:end]
                assert len(call.arguments) >= longest
                longest = len(call.arguments)
        assert longest >= len(whole) - 1


WAIT: Final = {"default", "pythonic", "minimax_m3", "minimax_m3_nom"}
"""Formats whose calls are known only when they are whole."""


@pytest.mark.property
@each_case("writer,choice", list(itertools.product(NAMES, CHOICES)))
def test_a_call_in_the_formats_own_form_that_is_cut_off_anywhere_is_never_text(writer: str, choice: str) -> None:
    made = plan(writer, CHOICES[choice])
    text = WRITERS[writer].calls([FIND])
    names, by_character = 0, set(some_of(range(len(text)), NAMES.index(writer)))
    for end in ends(text, writer):
        found = read(made, [text[:end]], is_cut=True)
        if end in by_character:
            assert read(made, list(text[:end]), is_cut=True) == found
        assert not found.content, text[:end]
        assert [call.name for call in found.calls] in ([], ["find"])
        names += len(found.calls)
    assert names > (10 if share() >= IN_TEST_ALL else 0) or writer in WAIT


@each_case("writer,choice", list(itertools.product(NAMES, ["auto", "required"])))
def test_one_call_is_kept_without_parallel_calls(writer: str, choice: str) -> None:
    made = plan(writer, choice, parallel_tool_calls=False)
    texts = [WRITERS[writer].calls([PING, FIND])] + ([guided(choice, PING, FIND)] if choice == "required" else [])
    for text in texts:
        for pieces in ([text], list(text)):
            found = read(made, pieces)
            assert (found.content, found.reasoning) == ("", "")
            assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [PING]


@each_case("writer,choice", list(itertools.product(NAMES, CHOICES)))
def test_text_where_a_call_had_to_come_is_content(writer: str, choice: str) -> None:
    made = plan(writer, CHOICES[choice])
    for text in ("I would rather not.", "No {x} and [y].", "{smile} ok", "[1] says so"):
        for pieces in ([text], list(text)):
            assert read(made, pieces) == Joined(text)


def test_every_format_is_here() -> None:
    assert {TOOL_FORMATS[FORMAT_OF.get(name, name)].form for name in NAMES} == {
        form.form for form in TOOL_FORMATS.values()
    }
    assert set(UNIFIED_REASONING.values()) <= set(REASONING_FORMATS)
