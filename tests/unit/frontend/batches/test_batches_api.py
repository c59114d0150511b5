"""Batches through the routes of a frontend: from the upload of the lines to the results, and every way to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import Overloaded
from support.batch_client import begin, chat_line, jsonl, poll, results, upload
from support.frontend_cluster import Cluster, cluster, say
from support.patience import PATIENCE_SECONDS


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, files_dir=tmp_path / "files", batch_model_wait_seconds=0.0) as found:
        yield found


async def test_every_line_is_answered_and_found_by_its_id(house: Cluster) -> None:
    await house.worker(say("hello"))
    batch = await begin(house, [chat_line(f"line-{number}") for number in range(40)], metadata={"for": "a test"})
    assert (batch["object"], batch["endpoint"], batch["metadata"]) == (
        "batch",
        "/v1/chat/completions",
        {"for": "a test"},
    )
    assert batch["expires_at"] == batch["created_at"] + 86_400

    ended = await poll(house, batch["id"])

    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert ended["model"] == "m"
    assert ended["error_file_id"] is None
    assert ended["created_at"] <= ended["in_progress_at"] <= ended["finalizing_at"] <= ended["completed_at"]
    found = await results(house, ended)
    assert set(found) == {f"line-{number}" for number in range(40)}
    first = found["line-0"]
    assert first["id"].startswith("batch_req_")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert ended["usage"]["output_tokens"] == 40 * first["response"]["body"]["usage"]["completion_tokens"]
    output = (await house.client.get(f"/v1/files/{ended['output_file_id']}")).json
    assert (output["purpose"], output["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    assert house.frontend.parts["batches"].service._room.lines.used == 0  # every slot is given back


async def test_a_line_that_breaks_a_rule_of_its_api_fails_alone(house: Cluster) -> None:
    await house.worker()
    wrong = chat_line("wrong")
    wrong["body"]["temperature"] = 99
    batch = await begin(house, [chat_line("right"), wrong, chat_line("nobody", model="unheard-of")])

    found = await results(house, await poll(house, batch["id"]))

    assert found["right"]["response"]["status_code"] == 200
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["nobody"]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"not json\n", "invalid_json_line"),
        (b"[]\n", "invalid_json_line"),
        (jsonl([{"custom_id": "a"}]), "missing_required_parameter"),
        (jsonl([chat_line("a", method="GET")]), "invalid_method"),
        (jsonl([chat_line("a", url="/v1/completions")]), "mismatched_endpoint"),
        (jsonl([chat_line("a"), chat_line("a")]), "duplicate_custom_id"),
        (jsonl([chat_line("a", body={"model": "m", "stream": True})]), "unsupported_value"),
        (jsonl([chat_line("a", body=[1])]), "invalid_json_line"),
        (jsonl([chat_line("a" * 513)]), "invalid_value"),
    ],
)
async def test_an_input_that_breaks_a_rule_fails_before_any_line_is_executed(
    house: Cluster, lines: bytes, code: str
) -> None:
    worker = await house.worker()
    file = (await upload(house, lines)).json
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await house.client.call("POST", "/v1/batches", body)).json

    ended = await poll(house, batch["id"])

    assert ended["status"] == "failed"
    assert ended["errors"]["data"][0]["code"] == code
    assert ended["failed_at"] is not None
    assert worker.requests == []


async def test_a_batch_is_cancelled_in_its_middle(house: Cluster) -> None:
    worker = await house.worker()
    worker.script = worker.hold
    batch = await begin(house, [chat_line(f"line-{number}") for number in range(100)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.started.wait()

    cancelling = await house.client.call("POST", f"/v1/batches/{batch['id']}/cancel")
    ended = await poll(house, batch["id"])

    assert cancelling.json["status"] == "cancelling"
    assert ended["status"] == "cancelled"
    found = await results(house, ended)
    assert len(found) == 100
    assert {line["error"]["code"] for line in found.values()} == {"batch_cancelled"}
    again = await house.client.call("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (again.status, again.json["error"]["message"]) == (409, "Cannot cancel a batch with status 'cancelled'.")


async def test_a_model_without_workers_keeps_its_lines_waiting(house: Cluster) -> None:
    worker = await house.worker()
    first = await begin(house, [chat_line("before")])
    await poll(house, first["id"])
    await worker.stop()
    await house.gone("m")
    batch = await begin(house, [chat_line("after")])
    assert (await poll(house, batch["id"], "in_progress", "completed"))["status"] == "in_progress"
    await house.worker()

    assert (await poll(house, batch["id"]))["status"] == "completed"


async def test_workers_that_are_full_get_the_lines_later(house: Cluster) -> None:
    refused = 0

    async def script(body: Any, context: Any, sink: Any) -> None:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise Overloaded("full")
        sink.send_tokens(list(b"ok"), finish_reason="stop")

    await house.worker(script)
    batch = await begin(house, [chat_line("a"), chat_line("b")])

    ended = await poll(house, batch["id"])

    assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    gate = house.frontend.parts["batches"].service._conductor._parts.gates.of("m")
    assert gate.in_flight == 0  # each line has left the gate once


async def test_lines_have_the_lowest_priority_and_their_ids(house: Cluster) -> None:
    worker = await house.worker()
    batch = await begin(house, [chat_line("a")])
    found = await results(house, await poll(house, batch["id"]))

    (request,) = worker.requests
    assert request["routing"]["priority"] == -1
    assert found["a"]["response"]["request_id"] == found["a"]["id"]


async def test_the_input_of_a_batch_that_runs_is_not_deleted(house: Cluster) -> None:
    worker = await house.worker()
    worker.script = worker.hold
    batch = await begin(house, [chat_line("a")])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.started.wait()

    refused = await house.client.call("DELETE", f"/v1/files/{batch['input_file_id']}")
    await house.client.call("POST", f"/v1/batches/{batch['id']}/cancel")
    await poll(house, batch["id"])
    deleted = await house.client.call("DELETE", f"/v1/files/{batch['input_file_id']}")

    assert refused.status == 409
    assert deleted.json == {"id": batch["input_file_id"], "object": "file", "deleted": True}


async def test_batches_are_listed_in_pages(house: Cluster) -> None:
    await house.worker()
    ids = [(await begin(house, [chat_line("a")]))["id"] for _ in range(3)]

    first = (await house.client.begin("GET", "/v1/batches", query="limit=2").done()).json
    rest = (await house.client.begin("GET", "/v1/batches", query=f"limit=2&after={first['last_id']}").done()).json

    assert [batch["id"] for batch in first["data"]] == ids[:0:-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert [batch["id"] for batch in rest["data"]] == ids[:1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_file_id"),
        ({"input_file_id": "file-x", "endpoint": "/v1/moderations", "completion_window": "24h"}, "endpoint"),
        ({"input_file_id": "file-x", "endpoint": "/v1/responses", "completion_window": "1h"}, "completion_window"),
        (
            {"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h", "metadata": {"a": 1}},
            "metadata.a",
        ),
        (
            {
                "input_file_id": "f",
                "endpoint": "/v1/responses",
                "completion_window": "24h",
                "metadata": {"a" * 65: "b"},
            },
            "metadata",
        ),
    ],
)
async def test_a_request_that_breaks_a_rule_names_the_field(house: Cluster, body: Any, param: str) -> None:
    answer = await house.client.call("POST", "/v1/batches", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_what_is_not_there_is_a_404(house: Cluster) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = await house.client.call("POST", "/v1/batches", body)
    assert (made.status, made.json["error"]["message"]) == (404, "No such File object: file-x")
    for method, path in [
        ("GET", "/v1/batches/batch_x"),
        ("POST", "/v1/batches/batch_x/cancel"),
        ("GET", "/v1/files/file-x"),
        ("GET", "/v1/files/file-x/content"),
        ("DELETE", "/v1/files/file-x"),
    ]:
        assert (await house.client.call(method, path)).status == 404, path


async def test_a_frontend_without_a_directory_says_how_to_switch_them_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        for method, path in [("POST", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/f/content")]:
            answer = await house.client.call(method, path)
            assert answer.status == 501
            assert "--files-dir" in answer.json["error"]["message"]


async def test_the_gauges_tell_what_is_there(house: Cluster) -> None:
    await house.worker()
    batch = await begin(house, [chat_line("a")])
    ended = await poll(house, batch["id"])
    size = json.loads((await house.client.get(f"/v1/files/{ended['output_file_id']}")).body)["bytes"]

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not house.metric("dynamo_frontend_batch_jobs", status="completed"):
            await asyncio.sleep(0.02)

    assert house.metric("dynamo_frontend_batch_lines_total", result="completed") == 1
    assert house.metric("dynamo_frontend_files_bytes") > size


async def test_a_file_with_a_byte_order_mark_and_long_ids_is_a_batch(house: Cluster) -> None:
    await house.worker(say("hi"))
    long = "a" * 512
    file = await upload(house, b"\xef\xbb\xbf" + jsonl([chat_line(long), chat_line("b")]))
    batch = await begin(house, [], input_file_id=file.json["id"])
    found = await results(house, await poll(house, batch["id"]))
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {long: 200, "b": 200}
