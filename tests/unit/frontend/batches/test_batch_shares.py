"""No project takes the files, uploads, batches and checks that the others need."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.parts.batches.directory import BatchDirectory
from dynamo.frontend.parts.batches.input_check import MAX_EMPTY_LINES, InputChecks, check_input
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.protocol.batches.objects import BatchObject
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange
from support.batch_client import CHAT, FORM_HEADERS, chat_line, form, jsonl
from support.frontend_cluster import Cluster
from support.patience import PATIENCE_SECONDS

RECORDS = (key("alice", project="blue"), key("bob", project="blue"), key("carol", project="red"))
MIB = 1024 * 1024


async def upload(house: Cluster, name: str, data: bytes, purpose: str = "user_data") -> Exchange:
    return await house.client.call(
        "POST", "/v1/files", form(data, purpose=purpose), headers=FORM_HEADERS | bearer(name)
    )


def half_upload(house: Cluster, name: str, size: int) -> Exchange:
    """Send the beginning of a file, and leave the connection as it is."""
    body = form(b"x" * (size + 100), purpose="user_data")[:-100]
    return house.client.begin("POST", "/v1/files", body, headers=FORM_HEADERS | bearer(name), more_body=True)


async def make_batch(house: Cluster, name: str, file_id: str) -> Exchange:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return await house.client.call("POST", "/v1/batches", body, headers=bearer(name))


def refusal(exchange: Exchange) -> tuple[int | None, str]:
    return exchange.status, exchange.json["error"]["code"]


async def test_one_project_leaves_batches_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.room.MAX_OPEN_BATCHES", 8)
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:  # no worker: none ends
        mine = (await upload(house, "alice", jsonl([chat_line("a")]), "batch")).json["id"]
        made = [(await make_batch(house, name, mine)).status for name in ("alice", "bob") * 3]
        assert made == [200] * 4 + [429] * 2
        refused = await make_batch(house, "alice", mine)
        assert refusal(refused) == (429, "too_many_batches")
        assert "this project, which may have 4" in refused.json["error"]["message"]
        theirs = (await upload(house, "carol", jsonl([chat_line("a")]), "batch")).json["id"]
        assert (await make_batch(house, "carol", theirs)).status == 200


async def test_a_project_that_is_alone_has_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.room.MAX_OPEN_BATCHES", 8)
    async with closed_cluster(tmp_path, *RECORDS[:2], files_dir=tmp_path / "files") as house:
        file = (await upload(house, "alice", jsonl([chat_line("a")]), "batch")).json["id"]
        made = [(await make_batch(house, "alice", file)).status for _ in range(9)]
        assert made == [200] * 8 + [429]


async def test_empty_files_are_counted(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files", files_total_count=3) as house:
        assert [(await upload(house, "alice", b"")).status for _ in range(3)] == [200] * 3
        full = await upload(house, "bob", b"")
        assert refusal(full) == (413, "storage_limit_exceeded")
        assert "DYN_FILES_TOTAL_COUNT" in full.json["error"]["message"]
        assert (await upload(house, "carol", b"")).status == 200
        directory = BatchDirectory(tmp_path / "files")
        assert len(list(directory.blobs())) == 4
        assert list(directory.uploads().iterdir()) == []


async def test_uploads_on_their_way_count_against_the_files_of_their_project(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files", files_total_bytes=5 * MIB) as house:
        halves = [half_upload(house, "alice", 2 * MIB + 4096) for _ in range(6)]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while sum(half.status == 413 for half in halves) < 4:
                    await asyncio.sleep(0.01)
            assert refusal(await upload(house, "bob", b"x" * 2 * MIB)) == (413, "storage_limit_exceeded")
            assert (await upload(house, "carol", b"x" * 2 * MIB)).status == 200
            uploads = BatchDirectory(tmp_path / "files").uploads()
            assert sum(path.stat().st_size for path in uploads.iterdir()) <= 5 * MIB
        finally:
            for half in halves:
                half.disconnect()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while list(uploads.iterdir()):
                await asyncio.sleep(0.01)
        assert (await upload(house, "bob", b"x" * 2 * MIB)).status == 200


async def test_one_project_leaves_uploads_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.stored_files.MAX_UPLOADS", 8)
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        halves = [half_upload(house, "alice", 10) for _ in range(8)]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while sum(half.status == 429 for half in halves) < 4:
                    await asyncio.sleep(0.01)
            assert refusal(await upload(house, "bob", b"x")) == (429, "too_many_uploads")
            assert (await upload(house, "carol", b"x")).status == 200
        finally:
            for half in halves:
                half.disconnect()


async def test_a_project_leaves_an_eighth_of_the_disk_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_frsize, f_bavail = 1, 8000

    monkeypatch.setattr("dynamo.frontend.parts.batches.stored_files.os.statvfs", lambda path: Disk)
    async with closed_cluster(tmp_path, *RECORDS, files_dir=tmp_path / "files") as house:
        assert refusal(await upload(house, "alice", b"x" * 7001)) == (507, "storage_limit_exceeded")
        assert (await upload(house, "alice", b"x" * 7000)).status == 200
        Disk.f_bavail = 1000
        assert refusal(await upload(house, "bob", b"x")) == (507, "storage_limit_exceeded")
        assert (await upload(house, "carol", b"x" * 100)).status == 200


def test_a_file_of_line_feeds_is_refused_after_as_many_lines_as_a_batch_may_have_twice(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([chat_line("a")]) + b"\n" * 5_000_000)
    found = check_input(source, tmp_path, CHAT, max_line_bytes=1000)
    assert [error.code for error in found.errors] == ["too_many_tasks"]
    source.write_bytes(b"\n" * MAX_EMPTY_LINES + jsonl([chat_line("a")]))
    assert check_input(source, tmp_path, CHAT, max_line_bytes=1000).lines == 1


async def test_the_checks_of_one_owner_leave_a_thread_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, running = threading.Event(), list[str]()

    def slow(source: Path, work: Path, endpoint: str, *, max_line_bytes: int) -> Any:
        running.append(source.name)
        if source.name.startswith("a"):
            assert release.wait(PATIENCE_SECONDS)
        return source.name

    monkeypatch.setattr("dynamo.frontend.parts.batches.input_check.check_input", slow)
    checks = InputChecks(SharedBound(2, 1, lambda: True), max_line_bytes=1000)

    async def check(owner: str, id: str) -> Any:
        batch = BatchObject(id=id, endpoint=CHAT, input_file_id=id, created_at=0, expires_at=0)
        return await checks.run(BatchRecord(batch=batch, owner=owner, key_id=""), tmp_path / id, tmp_path)

    try:
        of_a = [asyncio.ensure_future(check("a", f"a{number}")) for number in range(4)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while running != ["a0"]:
                await asyncio.sleep(0.001)
            assert [await check("b", "b0"), await check("c", "c0")] == ["b0", "c0"]
            assert running == ["a0", "b0", "c0"]
            release.set()
            assert await asyncio.gather(*of_a) == ["a0", "a1", "a2", "a3"]
    finally:
        release.set()
        checks.close()
