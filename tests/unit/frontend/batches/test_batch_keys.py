"""Batches behind keys: whose they are, in whose name their lines run, and what becomes of them when the key is taken away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.parts.batches import conductor
from support.access import bearer, closed_cluster, key, write_keys
from support.asgi_client import Exchange
from support.batch_client import BOUNDARY, CHAT, FINAL, FORM_HEADERS, chat_line, form, jsonl
from support.frontend_cluster import Cluster
from support.patience import PATIENCE_SECONDS

RECORDS = (
    key("alice", project="blue"),
    key("bob", project="blue"),
    key("carol", project="red"),
    key("dave", models=["other-*"]),
    key("reader", routes=["inference"]),
)


async def call(house: Cluster, method: str, path: str, name: str, body: Any = None) -> Exchange:
    return await house.client.call(method, path, body, headers=bearer(name))


async def upload(house: Cluster, name: str, lines: list[Any]) -> Exchange:
    headers = FORM_HEADERS | bearer(name)
    return await house.client.call("POST", "/v1/files", form(jsonl(lines), purpose="batch"), headers=headers)


async def begin(house: Cluster, name: str, lines: list[Any]) -> dict[str, Any]:
    file = (await upload(house, name, lines)).json
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    made = await call(house, "POST", "/v1/batches", name, body)
    assert made.status == 200, made.body
    found: dict[str, Any] = made.json
    return found


async def ended(house: Cluster, name: str, id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found: dict[str, Any] = (await call(house, "GET", f"/v1/batches/{id}", name)).json
            if found["status"] in FINAL:
                return found
            await asyncio.sleep(0.02)


async def test_files_and_batches_are_those_of_a_project(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        await house.worker()
        batch = await begin(house, "alice", [chat_line("a")])
        done = await ended(house, "alice", batch["id"])
        paths = [f"/v1/batches/{batch['id']}", f"/v1/files/{done['output_file_id']}"]
        for path in (*paths, f"{paths[1]}/content"):
            assert (await call(house, "GET", path, "bob")).status == 200
            assert (await call(house, "GET", path, "carol")).status == 404
        assert (await call(house, "POST", f"{paths[0]}/cancel", "carol")).status == 404
        assert (await call(house, "DELETE", paths[1], "carol")).status == 404
        for path in ("/v1/batches", "/v1/files"):
            assert (await call(house, "GET", path, "carol")).json["data"] == []
        assert len((await call(house, "GET", "/v1/files", "bob")).json["data"]) == 2
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await call(house, "POST", "/v1/batches", "carol", body)).status == 404
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches")):
            assert (await call(house, method, path, "reader")).status == 403


async def test_lines_run_as_requests_of_the_key(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        await house.worker()
        batch = await ended(house, "dave", (await begin(house, "dave", [chat_line("a")]))["id"])
        content = await call(house, "GET", f"/v1/files/{batch['error_file_id']}/content", "dave")
        (line,) = [json.loads(line) for line in content.body.splitlines()]
        assert line["response"]["status_code"] == 404
        assert line["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_batch_needs_what_its_endpoint_needs(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "burst": 0.5}
    clerk = key("clerk", routes=["files", "batches"], limits=limits)
    async with closed_cluster(tmp_path, clerk, files_dir=tmp_path / "files") as house:
        await house.worker()
        file = (await upload(house, "clerk", [chat_line("a"), chat_line("b")])).json["id"]
        for endpoint, group in ((CHAT, "inference"), ("/v1/embeddings", "embeddings")):
            body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
            made = await call(house, "POST", "/v1/batches", "clerk", body)
            assert (made.status, made.json["error"]["code"]) == (403, "insufficient_permissions")
            assert f"may not use the {group} routes" in made.json["error"]["message"]


async def test_a_line_whose_key_may_not_use_its_route_any_more_fails_and_counts(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "burst": 0.5}
    routes = ["files", "batches", "inference"]
    async with closed_cluster(
        tmp_path, key("clerk", routes=routes, limits=limits), files_dir=tmp_path / "files"
    ) as house:
        file = (await upload(house, "clerk", [chat_line("a"), chat_line("b")])).json["id"]  # no worker: both wait
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        made = await call(house, "POST", "/v1/batches", "clerk", body)
        write_keys(tmp_path / "keys.toml", key("clerk", routes=routes[:2], limits=limits))
        store = house.frontend.parts["keys"].store
        await store.refresh()
        worker = await house.worker()
        batch = await ended(house, "clerk", made.json["id"])
        content = await call(house, "GET", f"/v1/files/{batch['error_file_id']}/content", "clerk")
        lines = [json.loads(line)["response"] for line in content.body.splitlines()]
        assert [line["status_code"] for line in lines] == [403, 403]
        assert {line["body"]["error"]["code"] for line in lines} == {"insufficient_permissions"}
        assert worker.requests == []
        write_keys(tmp_path / "keys.toml", key("clerk", routes=routes, limits=limits))
        await store.refresh()
        answer = await house.client.chat(headers=bearer("clerk"))
        assert answer.headers["x-ratelimit-remaining-requests"] == "27"


async def test_a_key_that_is_taken_away_ends_its_batches(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        worker = await house.worker()
        worker.script = worker.hold
        batch = await begin(house, "alice", [chat_line(f"line-{number}") for number in range(9)])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.started.wait()
        write_keys(tmp_path / "keys.toml", *RECORDS[1:])
        keys = house.frontend.parts["keys"].store
        assert keys is not None
        await keys.refresh()

        found = await ended(house, "bob", batch["id"])

        assert found["status"] == "cancelled"
        assert found["errors"]["data"][0]["code"] == "key_revoked"
        assert found["request_counts"] == {"total": 9, "completed": 0, "failed": 9}


async def test_no_line_begins_with_a_key_that_was_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "LOOK_SECONDS", 3600.0)  # the batch itself is cancelled at the next look only
    released = asyncio.Event()

    async def script(body: Any, context: Any, sink: Any) -> None:
        await released.wait()
        sink.send_tokens(list(b"ok"), finish_reason="stop")

    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files", batch_concurrency=1) as house:
        worker = await house.worker(script)
        batch = await begin(house, "alice", [chat_line(f"line-{number}") for number in range(3)])
        service = house.frontend.parts["batches"].service
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not worker.requests:
                await asyncio.sleep(0.01)
            write_keys(tmp_path / "keys.toml", *RECORDS[1:])
            await house.frontend.parts["keys"].store.refresh()
            released.set()
            run = service._conductor._conducted[batch["id"]]
            while run.progress.backlog != 2 or service._room.lines.used:
                await asyncio.sleep(0.01)
        service._look()
        found = await ended(house, "bob", batch["id"])
    assert (found["status"], found["request_counts"]) == ("cancelled", {"total": 3, "completed": 1, "failed": 2})
    assert len(worker.requests) == 1


async def test_no_secret_is_on_the_disk(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        await house.worker()
        await ended(house, "alice", (await begin(house, "alice", [chat_line("a")]))["id"])
    secret = bearer("alice")["authorization"].removeprefix("Bearer ").encode()
    for path in (tmp_path / "files").rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path
    assert BOUNDARY.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "files").rglob("file-*"))
