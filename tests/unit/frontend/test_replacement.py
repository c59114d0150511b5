"""A model's last worker is lost: its streams and new requests wait for the replacement, and no longer. Under virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, Disconnected, EngineShutdown
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.testing.simulation.loop import run_virtual
from support.frontend_cluster import Cluster, Script, cluster, fail, say

TEXT = "abcdefgh"
BEGINNING = 1000.0  # of a virtual loop


def talk(*, dies_at: int | None = None, error: Callable[[], Exception] = lambda: EngineShutdown("going")) -> Script:
    """Sends TEXT a letter at a time, from where an earlier worker stood."""

    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        begins = 0 if context.prompt_tokens is None else len(body["token_ids"]) - context.prompt_tokens
        for number in range(begins, len(TEXT)):
            if number == dies_at:
                raise error()
            sink.send_tokens([ord(TEXT[number])], finish_reason="stop" if number == len(TEXT) - 1 else None)
            await asyncio.sleep(0.1)

    return script


def virtually(tmp_path: Path, scene: Callable[[Cluster], Awaitable[None]], wait_seconds: float = 10.0) -> None:
    async def main() -> None:
        async with cluster(tmp_path, replacement_wait_seconds=wait_seconds) as house:
            await scene(house)
            for model in house.frontend.models.served():
                assert not model._waiters

    run_virtual(main())


def now() -> float:
    return asyncio.get_running_loop().time() - BEGINNING


async def later(house: Cluster, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await house.worker(talk())


def text_of(answer: Any) -> str:
    return "".join(
        choice["delta"].get("content") or "" for chunk in answer.chunks for choice in chunk.get("choices", ())
    )


@pytest.mark.parametrize("dies_at", [0, 3])
@pytest.mark.parametrize("leaves", [False, True], ids=["its record stays", "its record goes"])
def test_a_stream_waits_for_the_replacement_of_the_only_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dies_at: int, leaves: bool
) -> None:
    caplog.set_level("INFO", "dynamo.router")

    async def scene(house: Cluster) -> None:
        worker = await house.worker(talk(dies_at=dies_at))
        request, began = house.client.begin_chat("hi", stream=True), now()
        replaced = asyncio.create_task(later(house, 3.0))
        await asyncio.sleep(1.0)
        if leaves:
            await worker.stop()
        answer = await request.done(100.0)
        await replaced
        assert (answer.status, text_of(answer)) == (200, TEXT)
        assert 3.0 <= now() - began < 4.5

    virtually(tmp_path, scene)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("dynamo.router.")]
    first = "lost worker" if dies_at else "failed before its first token"
    for line, wanted in zip(
        lines, (first, "waiting up to 10.0 s", "a replacement came", "moves to worker"), strict=True
    ):
        assert wanted in line


@pytest.mark.parametrize("dies_at", [0, 3])
def test_a_stream_whose_worker_is_not_replaced_ends_with_its_error_after_the_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dies_at: int
) -> None:
    async def scene(house: Cluster) -> None:
        await house.worker(talk(dies_at=dies_at))
        began = now()
        answer = await house.client.begin_chat("hi", stream=True).done(100.0)
        error = answer.chunks[-1]["error"]
        assert error["code"] == 503
        assert 10.0 <= now() - began < 10.5

    caplog.set_level("INFO", "dynamo.router")
    virtually(tmp_path, scene)
    assert "gave up after 10.0 s: no replacement came" in caplog.text


@pytest.mark.parametrize(
    ("error", "levels", "next_step"),
    [
        (EngineShutdown("the worker is shutting down"), ["WARNING"], "no other worker went on with it; keep a second"),
        (Disconnected("the connection was closed"), ["WARNING", "ERROR"], "; the log of worker "),
    ],
    ids=["stopped", "killed"],
)
def test_a_lost_request_is_an_error_in_the_log_unless_its_worker_was_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, levels: list[str], next_step: str
) -> None:
    async def scene(house: Cluster) -> None:
        await house.worker(talk(dies_at=3, error=lambda: error))
        await house.client.begin_chat("hi", stream=True).done(100.0)

    virtually(tmp_path, scene)
    found = [each for each in caplog.records if each.levelno > logging.INFO and "request" in each.getMessage()[:9]]
    assert [record.levelname for record in found] == levels
    assert next_step in found[-1].getMessage()
    assert found[-1].exc_info is None


def test_new_requests_wait_for_the_replacement_too_and_the_wait_begins_with_the_loss(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await house.worker(talk())
        await worker.stop()
        began = now()
        await asyncio.sleep(6.0)
        waiting = house.client.begin_chat("hi")
        await asyncio.sleep(1.0)
        assert [model["id"] for model in (await house.client.get("/v1/models")).json["data"]] == []
        second = await house.worker(talk())
        answer = await waiting.done(100.0)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert now() - began < 8.5
        await second.stop()
        began = now()
        await asyncio.sleep(6.0)
        assert (await house.client.begin_chat("hi").done(100.0)).status == 503
        assert 9.8 <= now() - began < 10.1
        assert (await house.client.begin_chat("hi").done(100.0)).status == 503
        assert now() - began < 10.2

    virtually(tmp_path, scene)


def test_a_client_that_leaves_waits_no_longer(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        await (await house.worker(talk())).stop()
        waiting = house.client.begin_chat("hi")
        await asyncio.sleep(1.0)
        waiting.disconnect()
        await waiting.done(100.0)
        assert now() < 2.0
        assert house.frontend.admission.in_flight == 0

    virtually(tmp_path, scene)


@pytest.mark.parametrize("kind", [CannotConnect, Disconnected])
def test_what_a_worker_reports_of_a_request_is_no_reason_to_wait(
    tmp_path: Path, kind: Callable[[str], Exception]
) -> None:
    async def scene(house: Cluster) -> None:
        await house.worker(fail(kind("its store")))
        assert (await house.client.begin_chat("hi").done(100.0)).status == 503
        assert now() < 1.0

    virtually(tmp_path, scene)


def test_the_wait_can_be_switched_off(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        worker = await house.worker(talk(dies_at=3))
        answer = await house.client.begin_chat("hi", stream=True).done(100.0)
        assert answer.chunks[-1]["error"]["code"] == 503
        await worker.stop()
        assert (await house.client.begin_chat("hi").done(100.0)).status == 503
        assert now() < 1.0

    virtually(tmp_path, scene, wait_seconds=0.0)


def test_a_replacement_with_other_files_is_another_model_and_is_served_all_the_same(tmp_path: Path) -> None:
    async def scene(house: Cluster) -> None:
        first = await house.worker(talk())
        await first.stop()
        await house.worker(say("other"), kv_cache_block_size=64)
        answer = await house.client.begin_chat("hi").done(100.0)
        assert answer.json["choices"][0]["message"]["content"] == "other"
        assert now() < 1.0

    virtually(tmp_path, scene)
