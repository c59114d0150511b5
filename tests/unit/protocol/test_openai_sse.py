"""The event stream's bytes: valid for any text, in the documented order, and cheap."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.openai import (
    DONE,
    KEEP_ALIVE,
    ChatStream,
    CompletionStream,
    annotation_event,
    chat_logprobs,
    completion_logprobs,
    nvext_json,
    token_logprobs,
    usage_json,
)
from dynamo.protocol.openai.escaping import json_line, json_text
from support.cases import each_case

TEXTS = st.text() | st.text(
    alphabet=["\ud800", "\udc00", "\u2028", "\u2029", "\x85", "\r", "\n", '"', "\\", "\x00", "é"]
)
USAGE = usage_json(3, 4)


def event(frame: bytes) -> dict[str, Any]:
    """The JSON of one data event, read as a client that splits lines generously would."""
    lines = frame.decode().splitlines()
    assert len(lines) == 2, lines
    assert lines[1] == ""
    assert lines[0].startswith("data: ")
    value: dict[str, Any] = json.loads(lines[0][6:])
    return value


def readable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def chat_stream(n: int = 1) -> ChatStream:
    return ChatStream("chatcmpl-1", 17, "org/m", n=n)


def completion_stream(choices: int = 1) -> CompletionStream:
    return CompletionStream("cmpl-1", 17, "org/m", choices=choices)


def test_a_chat_stream_byte_for_byte() -> None:
    stream = chat_stream()
    tail = b'"finish_reason":%b,"logprobs":null}],"created":17,"model":"org/m","object":"chat.completion.chunk"}\n\n'
    head = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{'
    assert stream.delta(0, "Hel") == head + b'"content":"Hel","role":"assistant"},' + tail % b"null"
    assert stream.delta(0, "lo") == head + b'"content":"lo"},' + tail % b"null"
    assert stream.delta(0, "", finish_reason="stop") == head + b"}," + tail % b'"stop"'
    assert stream.usage_chunk(USAGE) == (
        b'data: {"id":"chatcmpl-1","choices":[],"created":17,"model":"org/m","object":"chat.completion.chunk",'
        b'"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n'
    )


def test_a_completion_stream_byte_for_byte() -> None:
    stream = completion_stream()
    head = b'data: {"id":"cmpl-1","choices":['
    tail = b'],"created":17,"model":"org/m","system_fingerprint":null,"object":"text_completion","usage":%b}\n\n'
    choice = b'{"text":"%b","index":0,"logprobs":null,"finish_reason":%b}'
    assert stream.delta(0, "Hel") == head + choice % (b"Hel", b"null") + tail % b"null"
    assert stream.delta(0, "lo", finish_reason="length") == head + choice % (b"lo", b'"length"') + tail % b"null"
    assert stream.usage_chunk(USAGE) == head + tail % USAGE


def test_the_role_is_said_once_per_choice() -> None:
    stream = chat_stream(n=3)
    order = [0, 1, 0, 2, 2, 1]
    roles = [event(stream.delta(index, "x"))["choices"][0]["delta"].get("role") for index in order]
    assert roles == ["assistant", "assistant", None, "assistant", None, None]


@pytest.mark.parametrize(
    "extra", [{"finish_reason": "stop"}, {"logprobs": chat_logprobs([])}, {"usage": USAGE, "finish_reason": "stop"}]
)
def test_the_role_is_said_even_when_the_first_delta_has_no_text(extra: dict[str, Any]) -> None:
    stream = chat_stream()
    assert event(stream.delta(0, "", **extra))["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    assert "role" not in event(stream.delta(0, "x", **extra))["choices"][0]["delta"]


def test_the_first_delta_with_extras_names_the_role() -> None:
    stream = chat_stream()
    assert event(stream.delta(0, "a", usage=USAGE))["choices"][0]["delta"] == {"content": "a", "role": "assistant"}
    assert event(stream.delta(0, "b"))["choices"][0]["delta"] == {"content": "b"}


@pytest.mark.parametrize("stream", [chat_stream(), completion_stream()])
def test_a_delta_that_shows_nothing_is_not_sent(stream: ChatStream | CompletionStream) -> None:
    assert stream.delta(0, "") == b""
    assert stream.delta(0, "", usage=USAGE, token_ids=[1]) == b""


@pytest.mark.parametrize("stream", [chat_stream(), completion_stream()])
def test_running_usage_stands_on_every_chunk(stream: ChatStream | CompletionStream) -> None:
    for count in range(1, 4):
        chunk = event(stream.delta(0, "x", usage=usage_json(3, count, cached_tokens=2, reasoning_tokens=1)))
        assert chunk["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": count,
            "total_tokens": 3 + count,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1},
        }


@pytest.mark.parametrize("stream", [chat_stream(), completion_stream()])
def test_extension_members(stream: ChatStream | CompletionStream) -> None:
    assert event(stream.delta(0, "x", token_ids=[1, 2]))["nvext"] == {"completion_token_ids": [1, 2]}
    extra = nvext_json(stop_reason="END", timing=None)
    assert event(stream.delta(0, "x", nvext=extra))["nvext"] == {"stop_reason": "END"}
    both = event(stream.delta(0, "x", nvext=extra, token_ids=[3]))["nvext"]
    assert both == {"completion_token_ids": [3], "stop_reason": "END"}
    assert event(stream.usage_chunk(USAGE, nvext=extra))["nvext"] == {"stop_reason": "END"}
    assert nvext_json(stop_reason=None) is None


def test_logprobs_are_spliced_in() -> None:
    items = token_logprobs([5], [-0.5], None, str)
    chunk = event(chat_stream().delta(0, "5", logprobs=chat_logprobs(items)))
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    chunk = event(completion_stream().delta(0, "5", logprobs=completion_logprobs(items)))
    assert chunk["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]


@given(texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=3))
def test_a_text_with_log_probabilities_has_a_shorter_way_to_the_same_bytes(texts: list[str]) -> None:
    one, other = chat_stream(2), chat_stream(2)
    for index in (1, 0):
        for text in texts:
            logprobs = b'{"content":[%d]}' % index
            assert one.scored(index, text, logprobs) == other.delta(index, text, logprobs=logprobs)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_a_text_of_another_member_has_a_shorter_way_to_the_same_bytes(texts: list[str]) -> None:
    one, other = chat_stream(2), chat_stream(2)
    for index in (1, 0):
        for text in texts:
            written = one.plain_member(index, b'"reasoning":', text)
            assert written == other.members(index, b'"reasoning":' + json_text(text))
            assert event(written)["choices"][0]["delta"]["reasoning"] == readable(text)


def test_other_members_of_a_delta() -> None:
    stream = chat_stream()
    first = event(stream.members(0, b'"reasoning_content":"hm"'))
    assert first["choices"][0]["delta"] == {"reasoning_content": "hm", "role": "assistant"}
    call = b'"tool_calls":[{"index":0,"function":{"arguments":"{"}}]'
    second = event(stream.members(0, call, finish_reason="tool_calls"))
    assert second["choices"][0]["finish_reason"] == "tool_calls"
    assert second["choices"][0]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}


@given(TEXTS, TEXTS, st.sampled_from([None, "stop", "length", "odd\n\u2028"]), st.booleans())
def test_any_text_makes_one_valid_chat_event(text: str, model: str, reason: str | None, usage: bool) -> None:
    stream = ChatStream("chatcmpl-" + text, 1, model, n=2)
    for _ in range(2):
        frame = stream.delta(1, text, finish_reason=reason, usage=USAGE if usage else None)
        if not text and reason is None:
            assert frame == b""
            continue
        chunk = event(frame)
        assert chunk["choices"][0]["delta"].get("content", "") == readable(text)
        assert (chunk["model"], chunk["id"]) == (readable(model), readable("chatcmpl-" + text))
        assert chunk["choices"][0]["finish_reason"] == reason


@given(TEXTS, st.sampled_from([None, "stop"]), st.booleans())
def test_any_text_makes_one_valid_completion_event(text: str, reason: str | None, usage: bool) -> None:
    frame = completion_stream(3).delta(2, text, finish_reason=reason, usage=USAGE if usage else None)
    if not text and reason is None:
        assert frame == b""
        return
    chunk = event(frame)
    assert chunk["choices"][0]["text"] == readable(text)
    assert chunk["choices"][0]["index"] == 2


@given(st.lists(st.tuples(st.integers(0, 2), TEXTS.filter(bool)), max_size=12), st.integers(1, 7))
def test_a_client_reads_back_what_was_streamed_however_the_bytes_are_cut(
    pieces: list[tuple[int, str]], cut: int
) -> None:
    import openai._streaming  # here: it takes a second, and only the worker that runs this pays
    import openai.types.chat

    stream = chat_stream(n=3)
    wire = b"".join(stream.delta(index, text) for index, text in pieces) + KEEP_ALIVE + DONE
    chunks = (wire[start : start + cut] for start in range(0, len(wire), cut))
    heard = ["", "", ""]
    events = list(openai._streaming.SSEDecoder().iter_bytes(chunks))
    assert events[-1].data == "[DONE]"
    for sent in events[:-1]:
        if not sent.data:
            continue
        choice = openai.types.chat.ChatCompletionChunk.model_validate(sent.json()).choices[0]
        heard[choice.index] += choice.delta.content or ""
    expected = ["".join(readable(text) for index, text in pieces if index == wanted) for wanted in range(3)]
    assert heard == expected


def test_the_openai_types_accept_completion_chunks() -> None:
    import openai.types.completion  # here: it takes a second, and only the worker that runs this pays

    stream = completion_stream()
    for frame in (stream.delta(0, "x", finish_reason="stop"), stream.usage_chunk(USAGE)):
        openai.types.completion.Completion.model_validate(event(frame))


@given(TEXTS)
def test_annotations_are_named_events_with_a_json_string_in_a_comment(value: str) -> None:
    lines = annotation_event("formatted_prompt", value).decode().splitlines()
    assert lines[0] == "event: formatted_prompt"
    assert json.loads(lines[1].removeprefix(": ")) == readable(value)
    assert lines[2:] == [""]


def test_the_documented_annotations_byte_for_byte() -> None:
    assert annotation_event("request_id", "u") == b'event: request_id\n: "u"\n\n'
    assert annotation_event("token_ids", "[1,2]") == b'event: token_ids\n: "[1,2]"\n\n'


@each_case("name", ["", "a\nb", "a\u2028b", "\r"])
def test_an_annotation_name_must_fit_its_line(name: str) -> None:
    with pytest.raises(ValueError, match="annotation names"):
        annotation_event(name, "x")


def test_constants() -> None:
    assert (DONE, KEEP_ALIVE) == (b"data: [DONE]\n\n", b": keep-alive\n\n")


def test_a_lone_surrogate_beside_members_that_are_written_already_becomes_the_replacement_character() -> None:
    assert json_line({"a": "\ud800", "b": msgspec.Raw(b'{"c":[1.5]}')}) == '{"a":"\ufffd","b":{"c":[1.5]}}'.encode()
