"""The parts of `dynamo replay`: reading recordings, filling gaps, reading answers, comparing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.replay.answers import ReplayedAnswer, read_body, read_stream
from dynamo.cli.replay.command import ResendFlags, chosen_requests, compare, inference_paths, main, table
from dynamo.cli.replay.sending import ResentRequest, filled
from dynamo.cli.usage import UsageError
from dynamo.engines.recorded import files
from dynamo.engines.recorded.files import RecordedRequest, read_recordings
from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.recording.request_shape import shape_of
from support.cases import each_case


def line(event_type: str, **members: Any) -> str:
    return json.dumps({"event": {"schema": "dynamo.request.trace.v1", "event_type": event_type, **members}})


END = {"request_id": "r", "request_received_ms": 5, "http_status": 200, "path": "/v1/chat/completions"}


def test_the_records_of_a_request_are_put_together(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl.gz"
    later = {**END, "request_id": "first", "request_received_ms": 1}
    stream = {"request_id": "r", "gaps_ms": [1, 2], "tokens": [1, 1], "outputs": ["a", "b"], "content_keys": ["k"]}
    payload = {"request_id": "r", "path": "/p", "request": {"model": "m"}, "response": {"choices": []}}
    lines = [
        line("request_end", request=END), line("request_stream", stream=stream), line("request_payload", payload=payload),
        line("tool"), line("request_end", request=later),
    ]  # fmt: skip
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    first, second = read_recordings([file])
    assert (first.id, second.id) == ("first", "r")
    assert (second.status, second.body, second.is_whole, second.keys) == (200, {"model": "m"}, True, ["k"])
    assert second.outputs == ["a", "b"]


@pytest.mark.parametrize("cut", [10, 40, 120])
def test_a_torn_file_is_read_up_to_the_tear(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "f.jsonl.gz"
    lines = "".join(line("request_end", request={**END, "request_id": f"r{number}"}) + "\n" for number in range(2000))
    data = gzip.compress(lines.encode())
    file.write_bytes(data[: len(data) - cut])
    assert 0 < len(read_recordings([file])) < 2000


@each_case(
    "content,what",
    [
        ("not json\n{}", "line 1: not a JSON object"),
        ("hello", "line 1: not a JSON object"),
        ('{"a": 1}', "line 1: not a record of requests"),
        (line("request_end", request={}) + "\n{}", "line 1: not a record of requests: KeyError"),
    ],
)
def test_a_file_of_something_else_is_refused_by_line(content: str, what: str, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("f") / "f.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match=what):
        read_recordings([file])


@each_case(
    "members,what",
    [
        ({"request_received_ms": "inf"}, "not a time"),
        ({"request_received_ms": 10**400}, "OverflowError"),
        ({"http_status": "200"}, "not a number: str"),
        ({"ttft_ms": []}, "not a number: list"),
        ({"finish_reason_metadata": "x"}, "AttributeError"),
    ],
)
def test_a_record_whose_figures_are_none_is_refused_by_line(
    members: dict[str, Any], what: str, tmp_path_factory: Any
) -> None:
    file = tmp_path_factory.mktemp("f") / "f.jsonl"
    file.write_text(line("request_end", request={**END, **members}))
    with pytest.raises(InvalidArgument, match=f"line 1: not a record of requests: .*{what}"):
        read_recordings([file])


def test_a_line_that_nests_without_end_is_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("[" * 200_000 + "\n{}")
    with pytest.raises(InvalidArgument, match="line 1: not a JSON object"):
        read_recordings([file])


def test_a_compressed_file_is_unpacked_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 4 << 20)
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * (5 << 20)))
    with pytest.raises(InvalidArgument, match="unpacks to more than 4 MiB"):
        read_recordings([file])


def test_members_of_a_compressed_file_are_read_one_after_the_other(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl.gz"
    lines = [line("request_end", request={**END, "request_id": id}) + "\n" for id in ("r1", "r2")]
    file.write_bytes(b"\0\0".join(gzip.compress(each.encode()) for each in lines))
    assert [request.id for request in read_recordings([file])] == ["r1", "r2"]


def recorded(path: str) -> RecordedRequest:
    return RecordedRequest("r", path=path, status=200, body={})


@each_case(
    "path",
    [
        "/admin/v1/workers/1/drain", "/engine/sleep", "/v1/chat/completions/", "//v1/chat/completions",
        "/v1/chat/completions HTTP/1.1\r\nx: y", "/v1/batches", "",
    ],
)  # fmt: skip
def test_only_requests_of_inference_routes_are_sent_again(path: str) -> None:
    chat, stranger = recorded("/v1/chat/completions"), recorded(path)
    paths = inference_paths({})
    assert chosen_requests([stranger, chat, stranger], ResendFlags(), paths) == [chat]
    with pytest.raises(UsageError):
        chosen_requests([stranger], ResendFlags(), paths)


def test_a_route_that_a_setting_moves_is_replayed_too() -> None:
    paths = inference_paths({"DYN_HTTP_SVC_CHAT_PATH": "/llm/chat"})
    assert {"/llm/chat", "/v1/chat/completions", "/v1/messages"} <= paths


def test_what_a_stranger_wrote_is_printed_without_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.jsonl"
    id = "\x1b]0;title\x07\x1b[2J"
    file.write_text(
        "".join(
            line(kind, **{member: {**END, "request_id": id, "request": {"model": "m"}}}) + "\n"
            for kind, member in (("request_end", "request"), ("request_payload", "payload"))
        )
    )

    async def send_all(requests: list[RecordedRequest], *_: object) -> list[ResentRequest]:
        return [ResentRequest(request, ReplayedAnswer(500)) for request in requests]

    monkeypatch.setattr("dynamo.cli.replay.command.send_all", send_all)
    assert main([str(file)]) == 1
    shown = capsys.readouterr().out
    assert "\\x1b]0;title" in shown
    assert all(each.isprintable() for each in shown.splitlines())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nothing cannot be read: No such file"):
        read_recordings([tmp_path / "nothing"])


@given(st.lists(st.text(max_size=300), min_size=1, max_size=5), st.integers(0, 5))
def test_a_filled_body_has_the_lengths_of_the_one_that_was_described(texts: list[str], ids: int) -> None:
    body = {
        "model": "m", "temperature": 0.5,
        "messages": [{"role": "user", "content": text} for text in texts],
        "prompt": list(range(1, ids + 1)),
        "tools": [{"type": "function"}],
    }  # fmt: skip
    made, lost = filled(shape_of(body) or {})
    assert [len(message["content"]) for message in made["messages"]] == [len(text) for text in texts]
    assert [message["role"] for message in made["messages"]] == ["user"] * len(texts)
    assert made["temperature"] == 0.5
    assert len(made.get("prompt", [])) == ids
    assert "tools" in lost
    equal = [one["content"] == other["content"] for one in made["messages"] for other in made["messages"]]
    assert (
        equal == [one == other or len(one) == len(other) == 0 for one in texts for other in texts]
        or min(map(len, texts)) < 13
    )  # a mark does not fit into a short text


CHAT = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2}}  # fmt: skip
MESSAGE = {"type": "message", "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 2}}  # fmt: skip
RESPONSE = {"object": "response", "status": "completed", "output": [{"type": "message", "content": [{"text": "hi"}]}],
    "usage": {"input_tokens": 3, "output_tokens": 2}}  # fmt: skip


@each_case("body", [CHAT, MESSAGE, RESPONSE])
def test_bodies_of_every_api_are_read_alike(body: dict[str, Any]) -> None:
    found = read_body(200, json.dumps(body).encode())
    assert (found.texts, found.finish_reason, found.input_tokens, found.output_tokens) == ({0: "hi"}, "stop", 3, 2)


CHAT_STREAM = [
    {"choices": [{"index": 0, "delta": {"content": "h"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "i"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]
MESSAGE_STREAM = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
]
RESPONSE_STREAM = [
    {"type": "response.output_text.delta", "delta": "hi"},
    {"type": "response.completed", "response": RESPONSE},
]


@each_case("events", [CHAT_STREAM, MESSAGE_STREAM, RESPONSE_STREAM])
def test_streams_of_every_api_are_read_alike(events: list[dict[str, Any]]) -> None:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    found = read_stream(body.encode())
    assert (found.texts, found.finish_reason, found.input_tokens, found.output_tokens) == ({0: "hi"}, "stop", 3, 2)


def test_a_stream_that_fails_has_the_status_of_its_error() -> None:
    found = read_stream(
        b'data: {"error":{"message":"gone","type":"service_unavailable","code":503}}\n\ndata: [DONE]\n\n'
    )
    assert (found.status, found.error) == (503, "gone")


def resent(answer: ReplayedAnswer, **request: Any) -> ResentRequest:
    values: dict[str, Any] = {
        "status": 200, "is_whole": True, "body": {"temperature": 0}, "finish_reason": "stop", "input_tokens": 3,
        "output_tokens": 2, "response": CHAT,
    } | request  # fmt: skip
    return ResentRequest(RecordedRequest("r", **values), answer)


def test_what_depends_on_chance_is_not_compared() -> None:
    other = read_body(
        200, json.dumps({**CHAT, "choices": [{"message": {"content": "yo"}, "finish_reason": "length"}]}).encode()
    )
    assert [one.what for one in compare(resent(other)).differences] == ["finish_reason", "text"]
    assert compare(resent(other, body={})).differences == []
    assert compare(resent(other, body={"seed": 3})).differences != []


def test_an_answer_that_never_came_differs_also_where_nothing_is_known() -> None:
    silent = ReplayedAnswer(error="refused")
    assert [one.what for one in compare(resent(silent, status=None)).differences] == ["status"]
    assert any("refused" in line for line in table([compare(resent(silent, status=None))]))
