"""The output of a response: whatever a model writes, in whatever pieces, the events tell the items, and they are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import Unknown
from dynamo.protocol.openai.sse import DONE
from dynamo.protocol.responses.events import EventNumbers
from dynamo.protocol.responses.items import pack_reasoning, unpack_reasoning
from dynamo.protocol.responses.output import ItemIds, OutputShape, OutputWriter
from dynamo.protocol.responses.request import ResponseObject, ResponsesBody
from dynamo.protocol.responses.tools import CustomInputReader, OfferedTool
from support.response_streams import ResponseReader, read_events

ID = "resp_" + "0123456789abcdef" * 2
TEXT = st.text(st.sampled_from('ab \n"\\é😀\u2028\x85'), min_size=1, max_size=6)
ARGUMENTS = st.sampled_from(['{"input": "a\\nb"}', "{}", '{"city": "K\\u00f6ln"}', "", '{"input": "cut', "no json"])

# What a model writes: (kind, text); a call is (name, arguments, whether it ended).
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), TEXT),
        st.tuples(st.just("reasoning"), TEXT),
        st.tuples(st.just("call"), st.tuples(st.sampled_from(["f", "patch", "ns__f"]), ARGUMENTS, st.booleans())),
    ),
    max_size=8,
)
SHAPES = st.builds(OutputShape, has_summary=st.booleans(), packs_reasoning=st.booleans(), hides_reasoning=st.booleans())


def called(name: str) -> OfferedTool:
    return {"patch": OfferedTool("patch", is_custom=True), "ns__f": OfferedTool("f", "ns")}.get(name, OfferedTool(name))


def custom_input(arguments: str) -> str:
    reader = CustomInputReader()
    return reader.push(arguments) + reader.finish()


class Response:
    """One response, as a renderer writes it."""

    def __init__(self, shape: OutputShape) -> None:
        self._events = EventNumbers()
        self.output = OutputWriter(self._events, ItemIds(ID), called, shape)
        self._object = ResponseObject(ID, 1, ResponsesBody(model="m"), is_stored=False)
        begun = b'"response":' + self._object.json("in_progress")
        self.stream = self._events.event("response.created", begun)
        self.stream += self._events.event("response.in_progress", begun)

    def finish(self, status: Any) -> list[dict[str, Any]]:
        """End it; the items, after a strict reader has put them together from the events."""
        self.stream += self.output.finish(status)
        last = self._object.json(status, output=self.output.items, finish_reason="length")
        self.stream += self._events.event(f"response.{status}", b'"response":' + last) + DONE
        return ResponseReader(read_events(self.stream)).items


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def write(parts: Any, shape: OutputShape, status: str, size: int, *, in_short: bool = False) -> list[dict[str, Any]]:
    response = Response(shape)
    output = response.output
    for kind, said in parts:
        if kind == "call":
            name, arguments, has_ended = said
            response.stream += output.call(name, "call-1")
            for piece in pieces(arguments, size):
                response.stream += output.arguments(piece)
            if has_ended:
                response.stream += output.call_ended()
            continue
        for piece in pieces(said, size):
            short = output.plain_text() if in_short and kind == "text" else None
            if short is not None:
                response.stream += short(json.dumps(piece).encode())
            else:
                response.stream += output.text(piece) if kind == "text" else output.reasoning(piece)
    return response.finish(status)


@given(parts=PARTS, shape=SHAPES, status=st.sampled_from(["completed", "incomplete"]), size=st.integers(1, 6))
def test_the_items_do_not_depend_on_the_pieces(parts: Any, shape: OutputShape, status: str, size: int) -> None:
    whole = write(parts, shape, status, 1000)
    assert write(parts, shape, status, size) == whole
    assert write(parts, shape, status, size, in_short=True) == whole
    assert whole, "an answer without an item"
    assert all(item["status"] == "completed" for item in whole[:-1] if item["type"] in ("message", "reasoning"))
    said = "".join(item["content"][0]["text"] for item in whole if item["type"] == "message")
    text = "".join(said for kind, said in parts if kind == "text")
    assert "".join(said.split()) == "".join(text.split())
    if not shape.hides_reasoning:
        thought = "".join(item["content"][0]["text"] for item in whole if item["type"] == "reasoning")
        assert thought == "".join(said for kind, said in parts if kind == "reasoning")


def test_a_call_that_waits_begins_when_the_one_before_is_whole() -> None:
    response = Response(OutputShape())
    output = response.output
    response.stream += output.call("a", "1") + output.call("b", "2")
    response.stream += output.arguments('{"n":', 1) + output.arguments("{", 0)
    assert b'"name":"b"' not in response.stream
    response.stream += output.arguments("}", 0)
    assert b'"name":"b"' in response.stream
    with pytest.raises(Unknown, match="was over"):
        output.arguments("x", 0)
    response.stream += output.arguments("1}", 1)
    found = response.finish("completed")
    assert [(item["name"], item["arguments"], item["status"]) for item in found] == [
        ("a", "{}", "completed"),
        ("b", '{"n":1}', "completed"),
    ]


def test_a_dropped_call_stays_as_one_that_nobody_can_run() -> None:
    response = Response(OutputShape())
    output = response.output
    response.stream += output.call("a", "1") + output.arguments('{"n":') + output.call_dropped() + output.text("b")
    found = response.finish("completed")
    assert [(item["type"], item["status"]) for item in found] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]


def test_white_space_between_calls_is_no_message() -> None:
    shape = OutputShape()
    parts = [("text", "\n"), ("call", ("f", "{}", True)), ("text", "\n"), ("call", ("f", "{}", True)), ("text", "\n")]
    assert [item["type"] for item in write(parts, shape, "completed", 1)] == ["function_call", "function_call"]
    assert write([("text", "\n")], shape, "completed", 1)[0]["content"][0]["text"] == "\n"
    assert write([("text", " \n"), ("text", "x ")], shape, "completed", 1)[0]["content"][0]["text"] == " \nx "


def test_ids_name_their_response() -> None:
    ids = ItemIds(ID)
    first, second = ids.new("msg"), ids.new("fc")
    assert len(first) == len("msg_") + 32
    assert first[4:-5] == second[3:-5] == ID[5:-5]
    assert (first[-5:], second[-5:]) == ("00000", "00001")


@given(text=st.text(max_size=30), at=st.integers(0, 200))
def test_a_custom_input_that_was_cut_is_a_beginning_of_it(text: str, at: int) -> None:
    arguments = json.dumps({"input": text})
    assert custom_input(arguments) == text
    head = '{"input": "'
    cut = arguments[: len(head) + at]
    if len(cut) < len(arguments) - 1:
        assert text.startswith(custom_input(cut))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": 1}', '{"a": 1}'),
        ('"x"', "x"),
        ("plain", "plain"),
        ("", ""),
        ('{"inp', ""),
        ('{"x": 1, "input": "a"}', "a"),
        ('{"input": "a", "x": 1}', "a"),
        ('{"input": "a", "input": "b"}', "a"),
        ('{"input": "a\\qb\\uzz\nc"}', "a\\qb\\uzz\nc"),
        ('{"input": "\\ud83d\\ude00\\ud83d\\n\\ude00"}', "😀\ufffd\n\ufffd"),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\\\u0041"}', "\\u0041"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{ "input" :"', ""),
    ],
)
def test_what_a_model_wrote_in_place_of_the_one_argument(arguments: str, said: str) -> None:
    assert custom_input(arguments) == said
    for size in range(1, len(arguments)):
        reader = CustomInputReader()
        told = "".join(reader.push(piece) for piece in pieces(arguments, size)) + reader.finish()
        assert told == reader.text == said


@given(raw=st.text(st.sampled_from('"\\\\ud83de00aAn{}: input\n'), max_size=30), size=st.integers(1, 9))
def test_a_custom_input_does_not_depend_on_the_pieces(raw: str, size: int) -> None:
    for arguments in (raw, '{"input": "' + raw):
        reader = CustomInputReader()
        told = "".join(reader.push(piece) for piece in pieces(arguments, size)) + reader.finish()
        assert told == custom_input(arguments)


@given(text=st.text())
def test_packed_reasoning_is_unpacked(text: str) -> None:
    packed = pack_reasoning(text)
    assert unpack_reasoning(packed) == text.encode(errors="replace").decode()
    assert unpack_reasoning("gAAAA" + packed) is None
    assert unpack_reasoning(packed + "!") is None
