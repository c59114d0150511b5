"""The blocks of an answer do not depend on how its events were cut, nor on whether they are streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.apis.messages import MessagesApi
from dynamo.frontend.pipeline.api import Answer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, Event, Finished, Logprobs
from dynamo.protocol.messages import MessagesRequest, lower
from dynamo.protocol.messages.shapes import InputMessage, ThinkingConfig
from dynamo.text.output import CallArguments, CallBegan, CallDropped, CallEnded, Content, Reasoning
from support.message_streams import accumulated

API = MessagesApi()


class CountingTally:
    is_usage_known = True
    prompt_tokens, completion_tokens, cached_tokens = 7, 3, 2


def renderer(*, display: str | None = None, tools: Sequence[dict[str, Any]] = (), takes_text: bool = False) -> Any:
    source = MessagesRequest(
        model="m",
        messages=[InputMessage("user", "hi")],
        max_tokens=1,
        stop_sequences=["END"],
        thinking=ThinkingConfig("adaptive", display=display),
        tools=list(tools),
    )
    answer = SimpleNamespace(
        request=lower(source),
        model_name="m",
        model=SimpleNamespace(takes_text=takes_text),
        wants_nvext=False,
        exchange=SimpleNamespace(response_id="msg_1"),
        work=SimpleNamespace(plan=SimpleNamespace(parsing=None), tally=CountingTally()),
    )
    return API.renderer(cast(Answer, answer), RenderOptions())


def streamed(outputs: Sequence[Sequence[Event]], **options: Any) -> bytes:
    made = renderer(**options)
    return b"".join([made.stream(ChoiceOutput(0, events)) for events in outputs]) + made.end(with_usage=False)


def unary(outputs: Sequence[Sequence[Event]], **options: Any) -> dict[str, Any]:
    collected = CollectedAnswer(1)
    collected.add([ChoiceOutput(0, events) for events in outputs])
    found: dict[str, Any] = json.loads(renderer(**options).collect(collected))
    return found


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


TEXTS = st.text(alphabet="ab \n\té\u2028😀", max_size=8)
PLACES = st.lists(st.integers(0, 50), max_size=4)
INPUTS = st.sampled_from(["", "{}", '{"a": [1, {"b": "}\\n"}]}', '{"é": "\u2028"}', "[1]", '"x"', "{nope"])


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """One span of an answer: a text, reasoning, a call that is whole or turned out to be none."""
    kind = draw(st.sampled_from(["content", "reasoning", "call", "dropped"]))
    if kind in ("content", "reasoning"):
        made = Content if kind == "content" else Reasoning
        return [made(piece) for piece in cut(draw(TEXTS), draw(PLACES))]
    name, call_id = draw(st.sampled_from(["f", 'g"\n'])), draw(st.sampled_from(["1", "functions.f:0"]))
    pieces: list[Event] = [CallArguments(piece) for piece in cut(draw(INPUTS), draw(PLACES))]
    end: Event = CallEnded() if kind == "call" else CallDropped(draw(TEXTS))
    return [CallBegan(name, call_id), *pieces, end]


@st.composite
def answers(draw: st.DrawFn) -> list[list[Event]]:
    """The events of a whole answer, in the batches of its wake-ups."""
    events = [event for run in draw(st.lists(runs(), max_size=7)) for event in run]
    if draw(st.booleans()):  # cut off inside a call
        events += [CallBegan("f", "9"), CallArguments('{"a": ')]
    if draw(st.booleans()):
        events.insert(draw(st.integers(0, len(events))), Logprobs((1,), (0.5,)))
    has_called = any(isinstance(event, CallEnded) for event in events)
    reasons = ["stop", "length", "content_filter", *(["tool_calls"] if has_called else [])]
    events.append(Finished(draw(st.sampled_from(reasons)), draw(st.sampled_from([None, "END", "other", 7]))))
    bounds = [0, *sorted(draw(st.lists(st.integers(0, len(events)), max_size=6))), len(events)]
    return [events[begin:end] for begin, end in itertools.pairwise(bounds)]


@given(answers(), st.sampled_from([None, "omitted"]))
def test_a_stream_says_what_the_body_says(outputs: list[list[Event]], display: str | None) -> None:
    body = unary(outputs, display=display)
    assert accumulated(streamed(outputs, display=display)) == body
    blocks = body["content"]
    assert blocks
    assert all(block["text"].strip() for block in blocks if block["type"] == "text") or len(blocks) == 1
    assert (body["stop_reason"] == "tool_use") <= any(block["type"] == "tool_use" for block in blocks)
    assert body["usage"]["input_tokens"] == 5


@given(answers())
def test_the_blocks_do_not_depend_on_the_wake_ups(outputs: list[list[Event]]) -> None:
    apart = [[event] for events in outputs for event in events]
    assert accumulated(streamed(apart)) == accumulated(streamed([[event for events in outputs for event in events]]))


@given(answers())
def test_a_stream_of_eager_tools_is_well_formed(outputs: list[list[Event]]) -> None:
    tools = [{"name": "f", "input_schema": {}, "eager_input_streaming": True}]
    made = renderer(tools=tools)
    data = b"".join([made.stream(ChoiceOutput(0, events)) for events in outputs]) + made.end(with_usage=False)
    names = [line for line in data.decode().split("\n") if line.startswith("event: content_block_st")]
    assert names[0::2] == ["event: content_block_start"] * (len(names) // 2)
    assert names[1::2] == ["event: content_block_stop"] * (len(names) // 2)


def test_white_space_between_calls_is_no_block() -> None:
    call = (CallBegan("f", "1"), CallArguments("{}"), CallEnded())
    outputs: list[list[Event]] = [[Content("\n"), *call, Content("\n\n"), *call, Content("\n"), Finished("tool_calls")]]
    assert [block["type"] for block in accumulated(streamed(outputs))["content"]] == ["tool_use", "tool_use"]


def test_a_call_of_an_engine_whose_input_is_no_object_is_text() -> None:
    outputs: list[list[Event]] = [[CallBegan("f", "1"), CallArguments("[1]"), CallEnded(), Finished("tool_calls")]]
    body = accumulated(streamed(outputs))
    assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": "[1]"}], "end_turn")


INTERLEAVED: list[list[Event]] = [
    [CallBegan("f", "1"), CallEnded(), CallBegan("g", "2"), CallArguments("{", 1)],
    [CallArguments('{"x": 1}', 0), Content("so"), CallArguments('"y": 2}', 1), CallEnded()],
]


def test_an_engine_that_reads_its_own_text_may_write_its_calls_at_the_same_time() -> None:
    outputs: list[list[Event]] = [*INTERLEAVED, [Finished("tool_calls")]]
    body = accumulated(streamed(outputs, takes_text=True))
    assert body["content"] == [
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {"y": 2}},
    ]
    assert body == unary(outputs, takes_text=True)


def test_a_call_that_such_an_engine_had_to_cut_is_not_told() -> None:
    outputs: list[list[Event]] = [[*INTERLEAVED[0], CallArguments('{"x": 1}', 0), CallEnded(), Finished("length")]]
    body = accumulated(streamed(outputs, takes_text=True))
    assert [block["name"] for block in body["content"]] == ["f"]
    assert body["stop_reason"] == "max_tokens"
    assert body == unary(outputs, takes_text=True)


def test_later_reasoning_is_a_block_of_its_own() -> None:
    outputs: list[list[Event]] = [[Reasoning("a")], [Content("b")], [Reasoning("c")], [Finished("stop")]]
    found = [block.get("thinking", block.get("text")) for block in accumulated(streamed(outputs))["content"]]
    assert found == ["a", "b", "c"]
