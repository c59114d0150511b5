"""How batches end, and what is left when the process ends in the middle of that."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.main import main
from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.batches.directory import BatchDirectory
from dynamo.frontend.parts.batches.service import BatchService
from dynamo.runtime.base.steady_wall import steady_wall
from support.batch_client import begin, chat_line, poll, results, upload
from support.frontend_cluster import cluster, say
from support.patience import PATIENCE_SECONDS

STEPS = ("checked", "output", "error", "index", "work")
LINES = [chat_line(f"line-{number}", model="m" if number % 3 else "nobody") for number in range(12)]


class Crash(BaseException):
    """The process is gone: nothing catches it."""


def house_of(tmp_path: Path, **settings: Any) -> Any:
    return cluster(tmp_path, files_dir=tmp_path / "files", batch_model_wait_seconds=0.0, **settings)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("step", STEPS)
async def test_a_crash_between_two_last_steps_leaves_what_the_next_runner_finishes(tmp_path: Path, step: str) -> None:
    crashed = asyncio.Event()

    def after_step(name: str) -> None:
        if name == step:
            crashed.set()
            raise Crash

    async with house_of(tmp_path) as house:
        service = house.frontend.parts["batches"].service
        assert service is not None
        service._conductor._after_step = after_step
        await house.worker()
        batch = await begin(house, LINES)
        await until(lambda: asyncio.sleep(0, crashed.is_set()))

    async with house_of(tmp_path) as house:
        await house.worker()
        ended = await poll(house, batch["id"])
        found = await results(house, ended)
        assert ended["status"] == "completed"
        assert ended["request_counts"] == {"total": 12, "completed": 8, "failed": 4}
        assert set(found) == {line["custom_id"] for line in LINES}
        directory = BatchDirectory(tmp_path / "files")
        await until(lambda: asyncio.sleep(0, directory.working() == []))
        stored = {id for id, _ in directory.blobs()}
        assert stored == {ended["input_file_id"], ended["output_file_id"], ended["error_file_id"]}


async def test_files_whose_index_is_gone_are_kept_and_can_be_listed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "files"
    async with house_of(tmp_path) as house:
        file = (await upload(house, b"0123456789", purpose="user_data")).json
    for path in root.glob("index.sqlite*"):
        path.unlink()
    with pytest.raises(InvalidArgument, match=r"1 stored file\(s\), and index.sqlite is gone.*dynamo files repair"):
        async with house_of(tmp_path):
            pass
    assert [id for id, _ in BatchDirectory(root).blobs()] == [file["id"]]
    assert main(["files", "repair", str(root)]) == 0
    assert capsys.readouterr().out == f"{file['id']}  10 bytes\n"
    async with house_of(tmp_path) as house:
        assert (await house.client.get(f"/v1/files/{file['id']}/content")).body == b"0123456789"
    assert main(["files", "repair", str(root)]) == 0
    assert "every stored file has its row" in capsys.readouterr().err


async def test_a_file_without_a_row_is_named_and_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.stored_files.ORPHAN_SECONDS", -1.0)
    async with house_of(tmp_path) as house:
        assert (await upload(house, b"x", purpose="user_data")).status == 200
    stray = BatchDirectory(tmp_path / "files").blob("file-stray")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"of a newer index")
    async with house_of(tmp_path):
        await until(lambda: asyncio.sleep(0, "file-stray for one" in caplog.text))
        assert stray.read_bytes() == b"of a newer index"


async def test_lines_that_were_done_are_not_executed_again(tmp_path: Path) -> None:
    async with house_of(tmp_path) as house:
        worker = await house.worker()
        answered = 0

        async def script(body: Any, context: Any, sink: Any) -> None:
            nonlocal answered
            if answered >= 5:
                await worker.hold(body, context, sink)
                return
            answered += 1
            sink.send_tokens(list(b"one"), finish_reason="stop")

        worker.script = script
        batch = await begin(house, [chat_line(f"line-{number}") for number in range(12)])

        async def five_are_durable() -> bool:
            return (await house.client.get(f"/v1/batches/{batch['id']}")).json["request_counts"]["completed"] == 5

        await until(five_are_durable)

    async with house_of(tmp_path) as house:
        again = await house.worker(say("two"))
        found = await results(house, await poll(house, batch["id"]))
        texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in found.values()]
        assert sorted(texts) == ["one"] * 5 + ["two"] * 7
        assert len(again.requests) == 7


async def test_a_batch_expires_after_its_window(tmp_path: Path) -> None:
    async with house_of(tmp_path) as house:
        service: BatchService = house.frontend.parts["batches"].service
        answered = 0
        worker = await house.worker()

        async def script(body: Any, context: Any, sink: Any) -> None:
            nonlocal answered
            answered += 1
            if answered > 2:
                await worker.hold(body, context, sink)
                return
            sink.send_tokens(list(b"done"), finish_reason="stop")

        worker.script = script
        batch = await begin(house, [chat_line(f"line-{number}") for number in range(6)])

        async def two_are_durable() -> bool:
            return (await house.client.get(f"/v1/batches/{batch['id']}")).json["request_counts"]["completed"] == 2

        await until(two_are_durable)
        late = float(batch["expires_at"])
        conductor: Any = service._conductor
        conductor._now = lambda: late
        ended = await poll(house, batch["id"])

        assert ended["status"] == "expired"
        assert ended["expired_at"] == late
        found = await results(house, ended)
        codes = [line["error"]["code"] if line["error"] else "answered" for line in found.values()]
        assert sorted(codes) == ["answered"] * 2 + ["batch_expired"] * 4


async def test_a_wall_clock_that_jumps_expires_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house_of(tmp_path) as house:
        await house.worker()
        batch = await begin(house, LINES[:3])
        monkeypatch.setattr(steady_wall, "_wall", lambda: time.time() + 2 * 86_400)
        ended = await poll(house, batch["id"])
        assert ended["status"] == "completed"
        assert ended["completed_at"] < batch["expires_at"]
        assert await results(house, ended)  # its files have not expired either


async def test_one_process_runs_a_directory_and_the_other_takes_over(tmp_path: Path) -> None:
    async with house_of(tmp_path) as first, house_of(tmp_path) as second:
        await first.worker()
        await second.worker()
        batches = [await begin(house, [chat_line("a")]) for house in (first, second)]
        for batch in batches:
            assert (await poll(second, batch["id"]))["status"] == "completed"
        runners = [house.frontend.parts["batches"].service._room.directory.is_runner for house in (first, second)]
        assert sorted(runners) == [False, True]
        runner, other = (first, second) if runners[0] else (second, first)
        await runner.frontend.parts["batches"].service.aclose()
        batch = await begin(other, [chat_line("b")])
        assert (await poll(other, batch["id"]))["status"] == "completed"


async def test_a_disk_that_is_full_pauses_the_batch_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.group_commit.TRY_AGAIN_SECONDS", 0.05)
    async with house_of(tmp_path) as house:
        await house.worker()
        refusals = 0

        def full(file: int, data: Any) -> int:
            nonlocal refusals
            refusals += 1
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("dynamo.frontend.parts.batches.journal._write_all", full)
            batch = await begin(house, [chat_line(f"line-{number}") for number in range(20)])
            await until(lambda: asyncio.sleep(0, refusals > 2))
            shown = (await house.client.get(f"/v1/batches/{batch['id']}")).json
            why = "its results cannot be written (No space left on device)"
            assert (shown["status"], shown["paused"]) == ("in_progress", why)
            assert (await house.client.get("/v1/batches")).json["data"][0]["paused"] == why
            assert (await house.client.get("/health")).json["degraded"] == [f"batch {batch['id']} is paused: {why}"]
            await until(lambda: asyncio.sleep(0, house.metric("dynamo_frontend_batch_paused_jobs") == 1))
        ended = await poll(house, batch["id"])
        assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert ended["paused"] is None
        assert len(await results(house, ended)) == 20
        assert "degraded" not in (await house.client.get("/health")).json


async def test_the_size_of_files_is_bounded(tmp_path: Path) -> None:
    limits = {"file_limit_bytes": 3000, "batch_file_limit_bytes": 1000, "files_total_bytes": 4000}
    async with house_of(tmp_path, **limits) as house:
        assert (await upload(house, b"x" * 1000)).status == 200
        too_long = await upload(house, b"x" * 1001)
        assert (too_long.status, too_long.json["error"]["param"]) == (413, "file")
        assert (await upload(house, b"x" * 3000, purpose="user_data")).status == 200
        full = await upload(house, b"x", purpose="user_data")
        assert (full.status, full.json["error"]["code"]) == (413, "storage_limit_exceeded")
        directory = BatchDirectory(tmp_path / "files")
        assert list(directory.uploads().iterdir()) == []
        assert sum(path.stat().st_size for _, path in directory.blobs()) == 4000


async def test_files_expire_and_ranges_of_them_are_read(tmp_path: Path) -> None:
    async with house_of(tmp_path) as house:
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(house, b"0123456789", purpose="user_data", **fields)).json
        assert file["expires_at"] == file["created_at"] + 3600
        path = f"/v1/files/{file['id']}/content"
        part = await house.client.get(path, range="bytes=2-4")
        assert (part.status, part.body, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
        assert (await house.client.get(path, range="bytes=-3")).body == b"789"
        assert (await house.client.get(path, range="bytes=10-")).status == 416
        house.frontend.parts["batches"].service.files._now = lambda: file["expires_at"]
        assert (await house.client.get(path)).status == 404
        await house.frontend.parts["batches"].service.files.remove_expired()
        assert list(BatchDirectory(tmp_path / "files").blobs()) == []


def test_a_directory_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.frontend.parts.batches.directory._file_system", lambda path: "nfs4")
    with pytest.raises(Exception, match="DYN_FILES_DIR_FORCE"):
        BatchDirectory(tmp_path)
    BatchDirectory(tmp_path, allow_network=True)


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_batches_cancels_and_crashes_ends_well(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    made: dict[str, int] = {}
    for _ in range(3):
        async with house_of(tmp_path) as house:
            crashed = asyncio.Event()
            aim = chance.randrange(1, 12)

            steps = 0

            def after_step(name: str, aim: int = aim, crashed: asyncio.Event = crashed) -> None:
                nonlocal steps
                steps += 1
                if steps == aim:
                    crashed.set()
                    raise Crash

            service = house.frontend.parts["batches"].service
            assert service is not None
            service._conductor._after_step = after_step
            await house.worker()
            for _ in range(chance.randrange(1, 4)):
                size = chance.randrange(1, 9)
                made[(await begin(house, [chat_line(f"line-{number}") for number in range(size)]))["id"]] = size
            for id in chance.sample(sorted(made), chance.randrange(len(made))):
                answer = await house.client.call("POST", f"/v1/batches/{id}/cancel")
                assert answer.status in (200, 409)
            if chance.random() < 0.7:
                await asyncio.wait({asyncio.ensure_future(crashed.wait())}, timeout=0.2)
    async with house_of(tmp_path) as house:
        await house.worker()
        for id, size in made.items():
            ended = await poll(house, id)
            assert ended["status"] in ("completed", "cancelled")
            total = ended["request_counts"]["total"]
            assert total in ((size,) if ended["status"] == "completed" else (0, size))
            assert len(await results(house, ended)) == total
        directory = BatchDirectory(tmp_path / "files")
        await until(lambda: asyncio.sleep(0, directory.working() == []))
