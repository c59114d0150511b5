"""The request trace: what a frontend writes of its requests, and what it never writes."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument, Unknown
from dynamo.frontend.base.redaction import load_redaction
from dynamo.frontend.base.settings.recording import RecordingSettings, RequestTraceSettings
from dynamo.frontend.parts.recording.trace_writer import TraceWriter, open_sinks
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.content_key import content_key
from dynamo.settings.table import read_settings
from support.frontend_cluster import Cluster, cluster, fail, say

PROMPT = "a marker that nothing else contains"
EVERYTHING = ("request_end", "request_stream", "request_payload")
KEY = "sk-a-key-that-is-nowhere"


def lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        found += [json.loads(line) for line in data.splitlines()]
    return found


def written_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("trace.*"))


class Recorded:
    """A house, and what was recorded in it once it is closed."""

    def __init__(self, house: Cluster, path: Path) -> None:
        self.house, self._path = house, path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line["event"] for line in lines(self._path) if line["event"]["event_type"] == kind]


@asynccontextmanager
async def recording(tmp_path: Path, *records: str, **trace: Any) -> AsyncIterator[Recorded]:
    path = tmp_path / "trace"
    chosen = RequestTraceSettings(is_on=True, records=records or EVERYTHING, path=str(path), **trace)
    async with cluster(tmp_path, request_trace=chosen) as house:
        yield Recorded(house, path)


async def test_a_recorded_request_says_what_became_of_it(tmp_path: Path) -> None:
    async with recording(tmp_path, "request_end") as made:
        worker = await made.house.worker(say("hel", "lo"))
        headers = {"x-dynamo-session-id": "s-1", "x-request-id": "mine"}
        answer = await made.house.client.chat(PROMPT, headers=headers, temperature=0.5)
    (event,) = made.events("request_end")
    assert (event["schema"], event["event_source"]) == ("dynamo.request.trace.v1", "dynamo")
    request = event["request"]
    assert request["request_id"] == worker.contexts[0].id()
    assert request["response_id"] == answer.json["id"]
    assert (request["model"], request["http_status"], request["output_tokens"]) == ("m", 200, 5)
    prompt = worker.requests[0]["token_ids"]
    assert request["replay"]["input_length"] == request["input_tokens"] == len(prompt)
    assert len(request["replay"]["input_sequence_hashes"]) == -(-len(prompt) // 16)
    assert request["worker"] == {"decode_worker_id": f"{worker.endpoint.connection_id():x}"}
    assert request["finish_reason_metadata"] == {"finish_reason": "stop"}
    assert 0 <= request["ttft_ms"] <= request["total_time_ms"]
    assert event["agent_context"]["session_id"] == "s-1"
    assert made.events("request_payload") == made.events("request_stream") == []
    assert "marker" not in json.dumps(event)


@pytest.mark.parametrize("streams", [False, True])
async def test_content_is_recorded_only_where_it_was_asked_for(tmp_path: Path, streams: bool) -> None:
    async with recording(tmp_path, *EVERYTHING) as made:
        await made.house.worker(say("hel", "lo"))
        await made.house.client.chat(PROMPT, stream=streams)
    (payload,) = [event["payload"] for event in made.events("request_payload")]
    assert payload["endpoint"] == "openai.chat_completion"
    assert payload["request"]["messages"][0]["content"] == PROMPT
    choice = payload["response"]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hello", "stop")
    (stream,) = [event["stream"] for event in made.events("request_stream")]
    assert sum(stream["tokens"]) == 5
    assert len(stream["gaps_ms"]) == len(stream["tokens"]) == len(stream["outputs"])
    texts = [part if isinstance(part, str) else part.get("content", "") for part in stream["outputs"]]
    assert "".join(texts) == "hello"
    assert stream["outputs"][-1]["finish_reason"] == "stop"


async def test_the_times_of_a_stream_are_recorded_without_its_text(tmp_path: Path) -> None:
    async with recording(tmp_path, "request_stream") as made:
        await made.house.worker(say("hel", "lo"))
        await made.house.client.chat(PROMPT, stream=True)
    (stream,) = [event["stream"] for event in made.events("request_stream")]
    assert sum(stream["tokens"]) == 5
    assert "outputs" not in stream
    assert "marker" not in json.dumps(stream)


async def test_failed_and_refused_requests_are_recorded_without_an_answer(tmp_path: Path) -> None:
    async with recording(tmp_path, *EVERYTHING) as made:
        await made.house.worker(fail(Unknown("no")))
        await made.house.client.chat(PROMPT)
        await made.house.client.chat(PROMPT, temperature=9)
    assert [event["request"]["http_status"] for event in made.events("request_end")] == [500, 400]
    assert [event["request"]["error_type"] for event in made.events("request_end")] == ["internal", "validation"]
    assert ["response" in event["payload"] for event in made.events("request_payload")] == [False, False]


async def test_no_key_is_in_a_recording_whatever_headers_are_asked_for(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "cookie": KEY, "x-team": "blue"}
    wanted = tuple(headers)
    async with recording(tmp_path, *EVERYTHING, headers=wanted, format="jsonl") as made:
        await made.house.worker(fail(Unknown("no")))
        await made.house.client.chat(PROMPT, headers=headers)
    (payload,) = [event["payload"] for event in made.events("request_payload")]
    assert payload["http_request_headers"] == {"x-team": "blue"}
    written = written_in(tmp_path)
    assert PROMPT.encode() in written
    assert KEY.encode() not in written


async def test_the_key_of_a_record_is_that_of_what_a_worker_of_text_gets(tmp_path: Path) -> None:
    async with recording(tmp_path, "request_stream") as made:
        worker = await made.house.worker(model_input="Text")
        worker.script = worker.hold
        asked = made.house.client.begin_chat(PROMPT, temperature=0.5, user="u", stream=True, seed=1)
        await worker.started.wait()
        asked.disconnect()
        await asked.done()
    (stream,) = [event["stream"] for event in made.events("request_stream")]
    assert stream["content_keys"] == [content_key(worker.requests[0])]


# -- redaction ----------------------------------------------------------------------------------------------------------


def shorten(record: dict[str, Any]) -> dict[str, Any] | None:
    """Take the texts out of payloads, and drop what became of requests."""
    if record.get("schema"):  # a bundle
        record["request"]["body"] = "gone"
        return record
    event = record["event"]
    if event["event_type"] == "request_end":
        return None
    event["payload"]["request"]["messages"] = "gone"
    return record


def broken(record: dict[str, Any]) -> dict[str, Any]:
    """Fail, with the content in the error's text."""
    raise ValueError(json.dumps(record))


async def test_the_operators_function_decides_what_is_written(tmp_path: Path) -> None:
    async with recording(tmp_path, "request_end", "request_payload", redact=f"{__name__}.shorten") as made:
        await made.house.worker(say("hello"))
        await made.house.client.chat(PROMPT)
    assert made.events("request_end") == []
    assert made.events("request_payload")[0]["payload"]["request"]["messages"] == "gone"


async def test_a_record_that_the_function_fails_for_is_dropped_and_leaks_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(tmp_path, *EVERYTHING, redact=f"{__name__}:broken") as made:
        await made.house.worker(say("hello"))
        await made.house.client.chat(PROMPT)
        house = made.house
    assert lines(tmp_path / "trace") == []
    assert house.metric("dynamo_frontend_request_trace_dropped_total", reason="redaction") == 3
    assert "failed for it with ValueError" in caplog.text
    assert "marker" not in caplog.text


@pytest.mark.parametrize(("function", "bodies"), [("shorten", ["gone"]), ("broken", [])])
async def test_bundles_with_content_go_through_the_function_too(
    tmp_path: Path, function: str, bodies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = RecordingSettings(keep_failed_content=True)
    trace = RequestTraceSettings(redact=f"{__name__}.{function}")
    async with cluster(tmp_path, recording=kept, request_trace=trace) as house:
        await house.worker(fail(Unknown("no")))
        await house.client.chat(PROMPT)
        notes = house.frontend.parts["recording"].failures
        assert notes is not None
        found = [notes.ring.bundle(failure.id) for failure in notes.ring.recent()]
    assert [bundle["request"]["body"] for bundle in found if bundle is not None] == bodies
    assert "marker" not in caplog.text


def test_a_function_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(InvalidArgument, match="has no function 'nothing'"):
        load_redaction(f"{__name__}.nothing")
    with pytest.raises(InvalidArgument, match="cannot be imported"):
        load_redaction("no_such_module.function")


# -- the writer ---------------------------------------------------------------------------------------------------------


def test_files_follow_each_other_and_the_oldest_are_removed(tmp_path: Path) -> None:
    settings = RequestTraceSettings(
        is_on=True, path=str(tmp_path / "t"), format="jsonl", roll_lines=10, max_files=3, flush_seconds=0.01
    )
    writer = TraceWriter(settings, None, lambda reason, count: None)
    for number in range(100):
        writer.put(lambda number=number: [{"event_type": "e", "number": number}])  # type: ignore[misc]
    writer.close()
    numbers = [line["event"]["number"] for line in lines(tmp_path / "t")]
    assert numbers == list(range(70, 100))
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.glob("t.*"))


def test_what_finds_no_room_is_dropped_and_counted(tmp_path: Path) -> None:
    dropped: list[tuple[str, int]] = []
    hold = threading.Event()
    settings = RequestTraceSettings(is_on=True, path=str(tmp_path / "t"), capacity=4, flush_seconds=0.001)
    writer = TraceWriter(settings, None, lambda reason, count: dropped.append((reason, count)))

    def held() -> list[dict[str, Any]]:
        hold.wait()
        return []

    for _ in range(10):
        writer.put(held)
    assert 5 <= len(dropped) <= 6  # one may be in the thread's hands already
    assert set(dropped) == {("full", 1)}
    hold.set()
    writer.close()


def test_a_disk_that_takes_nothing_is_counted_and_stops_nobody(tmp_path: Path) -> None:
    dropped: list[tuple[str, int]] = []
    settings = RequestTraceSettings(is_on=True, path=str(tmp_path / "missing" / "t"), flush_seconds=0.001)
    writer = TraceWriter(settings, None, lambda reason, count: dropped.append((reason, count)))
    writer.put(lambda: [{"event_type": "e"}])
    writer.close()
    assert dropped == [("unwritable", 1)]


def test_a_file_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    settings = RequestTraceSettings(is_on=True, path=str(tmp_path / "t"))
    files = open_sinks(settings)[0]
    files.write([b'{"number": 1}'])
    (file,) = tmp_path.glob("t.*")
    with gzip.open(file) as stream:
        assert json.loads(stream.readline()) == {"number": 1}
    files.close()


def test_settings_are_the_native_ones(caplog: pytest.LogCaptureFixture) -> None:
    env = {
        "DYN_REQUEST_TRACE": "1",
        "DYN_REQUEST_TRACE_RECORDS": "request_end,request_payload",
        "DYN_REQUEST_TRACE_SINKS": "nats",
        "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
    }
    found = read_settings(FrontendSettings, env).request_trace
    assert found.is_on
    assert found.has_content
    assert found.format == "jsonl"
    assert found.sinks == ("file",)
    assert "the sink 'nats' is not in this version" in caplog.text
    assert not RequestTraceSettings().is_on
