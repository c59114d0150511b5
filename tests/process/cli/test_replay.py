"""`dynamo replay`: a recorded request, or a failed one, is sent again; and a recording answers without an engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import Unknown
from dynamo.frontend.base.settings.recording import RecordingSettings
from dynamo.frontend.http.server import HttpServer
from support.frontend_cluster import Cluster, cluster, say
from support.patience import PATIENCE_SECONDS
from support.processes import until
from support.serve_command import ServeCommand, serve_command

pytestmark = pytest.mark.process

APP = """
import asyncio

async def answer(messages, temperature=None):
    content = messages[-1]["content"]
    if "boom" in content:
        raise RuntimeError("the engine broke")
    for word in f"you said {content} twice".split():
        await asyncio.sleep(0.05)
        yield word + " "
"""


def replay(*args: str) -> tuple[int, dict[str, Any]]:
    """Run `dynamo replay ... --json`: its status, and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.cli.main", "replay", *args, "--json"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def chat(url: str, content: str, **more: Any) -> tuple[int, bytes]:
    body = {"model": "answer", "messages": [{"role": "user", "content": content}], **more}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@contextmanager
def serving_recording(tmp_path: Path, *args: str) -> Iterator[ServeCommand]:
    out, err = tmp_path / "replay.out", tmp_path / "replay.err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.cli.main", "replay", "--serve", *args, "--http-port", "0"],
            stdout=out_file, stderr=err_file, stdin=subprocess.DEVNULL, cwd=tmp_path,
        )  # fmt: skip
        try:
            command = ServeCommand(process, out, err)
            command.wait_ready()
            yield command
        finally:
            process.kill()
            process.wait()


def test_what_was_recorded_is_answered_alike_by_the_engine_and_by_the_recording_alone(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    trace = tmp_path / "trace"
    with serve_command(
        tmp_path, "--in-process", "--engine", "app.py:answer", "--http-port", "0",
        DYN_REQUEST_TRACE="1", DYN_REQUEST_TRACE_RECORDS="request_end,request_stream,request_payload",
        DYN_REQUEST_TRACE_FILE_PATH=str(trace), DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS="20",
    ) as command:  # fmt: skip
        command.wait_ready()
        assert chat(command.url, "one", temperature=0)[0] == 200
        assert chat(command.url, "two", temperature=0, stream=True)[0] == 200
        assert chat(command.url, "boom", temperature=0)[0] == 500
        assert chat(command.url, "three", temperature=9)[0] == 400
        (file,) = command.wait_for(lambda: list(tmp_path.glob("trace.*")), "a recording")

        def whole() -> str | None:
            """The records once the last one of each request is there, with the end of its line."""
            text = _text(file)
            return text if text.count('"request_payload"') == 4 and text.endswith("\n") else None

        recorded = tmp_path / "copy.jsonl"
        recorded.write_text(command.wait_for(whole, "the records of four requests"))
        status, again = replay(str(recorded), "--url", command.url)
        assert (status, again["requests"], again["different"]) == (0, 4, 0)
        compared = {name for result in again["results"] for name in result["compared"]}
        assert compared >= {"status", "error", "finish_reason", "input_tokens", "output_tokens", "text"}

    with serving_recording(tmp_path, str(recorded)) as served:
        status, again = replay(str(recorded), "--url", served.url, "--as-fast-as-possible")
        assert (status, again["different"]) == (0, 0), again
        assert again["results"][0]["total_ms"] > 150  # the recorded times: four gaps of 50 ms
        code, body = chat(served.url, "never recorded", temperature=0)
        assert code == 404
        assert b"is not in the recording" in body

    with serving_recording(tmp_path, str(recorded), "--as-fast-as-possible") as served:
        code, body = chat(served.url, "one", temperature=0)
        assert json.loads(body)["choices"][0]["message"]["content"].startswith("you said one")


def _text(file: Path) -> str:
    import gzip
    import zlib

    try:
        with gzip.open(file, "rt") as stream:
            return "".join(stream)
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(file.read_bytes()).decode()


def test_another_engine_is_found_to_answer_otherwise(tmp_path: Path) -> None:
    end = {"request_id": "r", "request_received_ms": 1, "http_status": 200, "path": "/v1/chat/completions",
        "output_tokens": 5, "finish_reason_metadata": {"finish_reason": "stop"}}  # fmt: skip
    body = {"model": "answer", "messages": [{"role": "user", "content": "one"}], "temperature": 0}
    response = {"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}
    payload = {"request_id": "r", "path": "/v1/chat/completions", "request": body, "response": response}
    lines = [{"event_type": "request_end", "request": end}, {"event_type": "request_payload", "payload": payload}]
    file = tmp_path / "r.jsonl"
    file.write_text(
        "".join(json.dumps({"event": {"schema": "dynamo.request.trace.v1", **line}}) + "\n" for line in lines)
    )
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "--in-process", "--engine", "app.py:answer", "--http-port", "0") as command:
        command.wait_ready()
        status, again = replay(str(file), "--url", command.url)
    assert status == 1
    assert {one["what"] for one in again["results"][0]["differences"]} == {"output_tokens", "text"}


# -- failed requests ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, str]]:
    """A frontend with a socket, in this process: its ring is at hand."""
    async with cluster(tmp_path, http_host="127.0.0.1", http_port=0, **settings) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            yield house, f"http://127.0.0.1:{server.port}"
        finally:
            await server.stop()
            await server.close()


async def _script(body: Any, context: Any, sink: Any) -> None:
    prompt = bytes(body["token_ids"]).decode(errors="replace")
    if "boom" in prompt:
        raise Unknown(f"no kernel for {len(prompt)} tokens")
    if "slow" in prompt:
        await context.async_killed_or_stopped()
        return
    await say("hello")(body, context, sink)


@pytest.mark.parametrize(
    ("content", "fields", "status"),
    [("boom", {}, 500), ("boom", {"stream": True}, 500), ("hi", {"temperature": 9}, 400), ("slow", {}, 504)],
)
async def test_a_failed_request_fails_alike_when_its_bundle_is_replayed(
    tmp_path: Path, content: str, fields: dict[str, Any], status: int
) -> None:
    kept = RecordingSettings(keep_failed_content=True)
    timeout = (
        {"request_timeout_seconds": 0.5} if status == 504 else {}
    )  # the others are answered before, however long it takes
    async with listening(tmp_path, recording=kept, **timeout) as (house, url):
        await house.worker(_script)
        await asyncio.to_thread(chat, url, content, **{"model": "m", **fields})
        notes = house.frontend.parts["recording"].failures
        assert notes is not None
        await until(lambda: bool(notes.ring.recent()), lambda: "the note of the failure")
        (failure,) = notes.ring.recent()
        file = tmp_path / "bundle.json"
        await asyncio.to_thread(file.write_text, json.dumps(notes.ring.bundle(failure.id), indent=2))
        code, again = await asyncio.to_thread(replay, str(file), "--url", url)
        await until(
            lambda: [group.count for group in notes.ring.grouped()] == [2], lambda: "the note of the second one"
        )
    assert (code, again["different"]) == (0, 0), again
    assert again["results"][0]["status"] == status
    assert again["results"][0]["compared"] == ["status", "error"]


async def test_a_failure_that_was_mended_is_found_to_differ(tmp_path: Path) -> None:
    async with listening(tmp_path, recording=RecordingSettings(keep_failed_content=True)) as (house, url):
        worker = await house.worker(_script)
        await asyncio.to_thread(chat, url, "boom", model="m")
        notes = house.frontend.parts["recording"].failures
        assert notes is not None
        await until(lambda: bool(notes.ring.recent()), lambda: "the note of the failure")
        file = tmp_path / "bundle.json"
        bundle = notes.ring.bundle(notes.ring.recent()[0].id)
        await asyncio.to_thread(file.write_text, json.dumps(bundle))
        worker.script = say("hello")
        code, again = await asyncio.to_thread(replay, str(file), "--url", url)
    assert code == 1
    assert again["results"][0]["differences"] == [{"what": "status", "recorded": 500, "replayed": 200}]


async def test_without_content_a_request_of_the_same_shape_is_sent(tmp_path: Path) -> None:
    async with listening(tmp_path, request_timeout_seconds=0.5) as (house, url):
        worker = await house.worker()
        worker.script = worker.hold
        await asyncio.to_thread(chat, url, "a prompt of some length", model="m", max_tokens=7)
        notes = house.frontend.parts["recording"].failures
        assert notes is not None
        await until(lambda: bool(notes.ring.recent()), lambda: "the note of the failure")
        file = tmp_path / "bundle.json"
        bundle = notes.ring.bundle(notes.ring.recent()[0].id)
        await asyncio.to_thread(file.write_text, json.dumps(bundle))
        code, again = await asyncio.to_thread(replay, str(file), "--url", url)
        first, second = worker.requests
    assert (code, again["results"][0]["status"]) == (0, 504)
    assert again["results"][0]["is_whole"] is False
    assert len(first["token_ids"]) == len(second["token_ids"])
    assert first["token_ids"] != second["token_ids"]
    assert second["stop_conditions"]["max_tokens"] == 7
