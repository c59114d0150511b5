"""The access log and the audit log: a line for each request and action, with nothing in it that should not be."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.models.adapters import ADAPTERS_PATH
from dynamo.frontend.parts.keys import line_file
from dynamo.frontend.parts.keys.line_file import LineFile
from support.access import bearer, closed_cluster, key, secret_of
from support.asgi_client import AsgiClient
from support.frontend_cluster import cluster, say


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_request_is_one_line_without_content_key_or_query(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    records = key("k", cidrs=None), key("boss", role="admin")
    async with closed_cluster(tmp_path, *records, access_log=str(path)) as found:
        await found.worker(say("hel", "lo"))
        client = found.client
        told = (await client.chat("private words", headers=bearer("k") | {"x-request-id": "mine"})).json["usage"]
        stream = await client.chat("private words", stream=True, headers=bearer("k"))
        await client.chat("private words", headers={"authorization": "Bearer sk-nobody-has-this"})
        await client.chat("private words", model="nonsense", headers=bearer("k"))
        await client.begin("GET", "/v1/models", headers=bearer("k"), query="token=private").done()
        await client.call("GET", "/health")
    lines = lines_of(path)
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 401),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/models", 200),
        ("GET", "/health", 200),
    ]
    plain, streamed, unknown, missing, _, open_ = lines
    assert (plain["request_id"], plain["key_id"], plain["model"], plain["stream"]) == ("mine", "k", "m", False)
    assert (plain["input"], plain["output"]) == (told["prompt_tokens"], told["completion_tokens"])
    assert plain["finish_reason"] == "stop"
    assert 0 < plain["ttft_ms"] <= plain["total_ms"]
    assert plain["decode_worker_id"]
    assert streamed["stream"] is True
    assert streamed["request_id"] == stream.headers["x-request-id"]
    assert (unknown["code"], "key_id" in unknown) == ("invalid_api_key", False)
    assert (missing["code"], missing["key_id"]) == ("model_not_found", "k")
    assert "key_id" not in open_
    whole = path.read_text()
    for secret in ("private", "sk-nobody", secret_of("k"), secret_of("k").rpartition(".")[2], "hello"):
        assert secret not in whole


async def test_a_client_that_left_is_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with cluster(tmp_path, access_log=str(path)) as found:
        worker = await found.worker()
        worker.script = worker.hold
        left = found.client.begin_chat(stream=True)
        await worker.started.wait()
        left.disconnect()
        await left.done()
    (line,) = lines_of(path)
    assert (line["status"], line["model"], line["endpoint"]) == (499, "m", "chat_completions")


async def test_actions_of_operators_are_on_the_disk_before_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    records = key("user"), key("boss", role="admin")
    async with closed_cluster(tmp_path, *records, audit_log=str(path), http_host="127.0.0.1") as found:
        await found.worker()
        asked = {"model": "m", "active_decode_blocks_threshold": 0.5}
        for app in (found.client, AsgiClient(found.frontend.admin_asgi)):
            path.write_text("")
            done = await app.call("POST", "/busy_threshold", asked, headers=bearer("boss"))
            assert done.status == 200, done.body
            (line,) = lines_of(path)
            assert (line["action"], line["key_id"], line["status"]) == ("POST /busy_threshold", "boss", 200)
            assert line["asked"] == asked
            assert "0.5" in json.dumps(line["after"])
            assert line["request_id"] == done.headers["x-request-id"]
            refused = await app.call("POST", "/busy_threshold", asked, headers=bearer("user"))
            nobody = await app.call("GET", "/busy_threshold")
            wrong = await app.call("POST", "/busy_threshold", {"model": "m", "x": -1}, headers=bearer("boss"))
            assert [answer.status for answer in (refused, nobody)] == [403, 401]
            assert [(line["key_id"], line["status"]) for line in lines_of(path)[1:]] == [
                ("user", 403),
                (None, 401),
                ("boss", wrong.status),
            ]
            path_of_one = f"{ADAPTERS_PATH}/none"
            gone = await app.call("DELETE", path_of_one, headers=bearer("boss"))
            assert (lines_of(path)[-1]["action"], lines_of(path)[-1]["status"]) == (
                f"DELETE {path_of_one}",
                gone.status,
            )
            assert (await app.call("GET", "/busy_threshold", headers=bearer("boss"))).status == 200
            assert len(lines_of(path)) == 5  # reading is no action
        assert "before" in lines_of(path)[0]
        assert "0.5" in json.dumps(lines_of(path)[0]["before"])  # as the first port left it
        await app.aclose()


async def test_an_action_that_cannot_be_logged_is_not_answered_as_done(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    async with closed_cluster(
        tmp_path, key("boss", role="admin"), audit_log=str(folder / "audit"), http_host="127.0.0.1"
    ) as found:
        await found.worker()
        (folder / "audit").unlink()
        folder.rmdir()
        with pytest.raises(FileNotFoundError):
            await found.client.call("POST", "/busy_threshold", {"model": "m"}, headers=bearer("boss"))
        folder.mkdir()


async def test_a_file_that_was_moved_away_is_made_again_and_what_cannot_be_written_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_file, "MAX_WAITING", 3)
    folder = tmp_path / "logs"
    folder.mkdir()
    file = LineFile(str(folder / "lines"))
    file.add(b"one")
    await file._write()
    (folder / "lines").rename(folder / "old")
    file.add(b"two")
    await file._write()
    assert [(folder / name).read_text() for name in ("old", "lines")] == ["one\n", "two\n"]
    (folder / "lines").unlink()
    (folder / "old").unlink()
    folder.rmdir()
    for line in (b"3", b"4", b"5", b"lost"):
        file.add(line)
        await file._write()
    folder.mkdir()
    await file.aclose()
    assert (folder / "lines").read_text() == "3\n4\n5\n"
    assert "1 lines" in caplog.text
    assert caplog.text.count("cannot be written") == 1
    with pytest.raises(InvalidArgument, match="no-such"):
        LineFile(str(tmp_path / "no-such" / "file"))


async def test_a_line_that_is_being_written_when_the_file_is_closed_stands_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.keys.line_file.WRITE_SECONDS", 0.0)
    file, writing, go_on = LineFile(str(tmp_path / "log")), threading.Event(), threading.Event()
    append = file._append

    def slowly(data: bytes, *, is_synced: bool) -> None:
        writing.set()
        go_on.wait()
        append(data, is_synced=is_synced)

    monkeypatch.setattr(file, "_append", slowly)
    file.add(b"one")
    await asyncio.to_thread(writing.wait)
    closing = asyncio.create_task(file.aclose())
    await asyncio.sleep(0)  # which cancels the loop that writes
    go_on.set()
    await closing
    assert (tmp_path / "log").read_text() == "one\n"
