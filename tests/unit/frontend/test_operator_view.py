"""What an operator reads at `/health` and `/metrics` of a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.router.workers.busy_workers import LoadReport
from support.frontend_cluster import Cluster, cluster, say
from support.tiny_model import write_tiny_model


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


async def test_health_names_a_discovery_store_that_does_not_answer(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.worker()
    assert "degraded" not in (await house.client.get("/health")).json
    monkeypatch.setattr(house.frontend.models._cluster.store, "trouble", lambda: "etcd at e does not answer")
    answer = await house.client.get("/health")
    assert answer.status == 200  # it still serves, from its last view
    assert answer.json["degraded"] == [
        "discovery: etcd at e does not answer; workers that come or go are not seen, and the last view is kept"
    ]


async def test_the_workers_of_a_model_are_counted_as_they_come_and_go(house: Cluster) -> None:
    def workers() -> float:
        return house.metric("dynamo_frontend_model_workers", model="m", worker_type="aggregated")

    first, second = await house.worker(), await house.worker()
    assert workers() == 2
    await first.stop()
    await house.frontend.models.wait_for(lambda: workers() == 1)
    await second.stop()
    await house.gone("m")
    assert workers() == 0


async def test_a_workers_last_request_is_on_its_gauges_until_it_leaves(house: Cluster) -> None:
    worker = await house.worker(say("hel", "lo"))
    await house.worker(model="other")
    await house.client.chat("hi")
    worker_id = f"{worker.endpoint.connection_id():x}"
    last = {"worker_id": worker_id, "dp_rank": "none", "worker_type": "decode"}
    prompt_tokens = len(worker.requests[0]["token_ids"])
    assert house.metric("dynamo_frontend_worker_last_input_sequence_tokens", **last) == prompt_tokens
    assert house.metric("dynamo_frontend_worker_last_time_to_first_token_seconds", **last) > 0
    house.frontend.models.note_load(LoadReport(worker.endpoint.connection_id(), 1, 7, None))
    rank = {**last, "dp_rank": "1"}
    assert house.metric("dynamo_frontend_worker_active_decode_blocks", **rank) == 7
    await worker.stop()
    await house.gone("m")
    assert worker_id not in house.frontend.metrics.expose().decode()
    house.frontend.models.note_load(LoadReport(worker.endpoint.connection_id(), 1, 7, None))  # a late report
    assert worker_id not in house.frontend.metrics.expose().decode()


async def test_requests_are_counted_by_the_stage_they_are_in(house: Cluster) -> None:
    worker = await house.worker()
    worker.script = worker.hold
    request = asyncio.create_task(house.client.chat("hi"))
    await worker.started.wait()
    name = "dynamo_frontend_stage_requests"
    assert [house.metric(name, stage=stage) for stage in ("preprocess", "route", "dispatch")] == [0, 0, 1]
    request.cancel()
    await asyncio.wait({request})
    assert house.metric(name, stage="dispatch") == 0


async def test_the_tokenizers_cache_is_counted(house: Cluster, tmp_path: Path) -> None:
    await house.worker(say([70], finish="length"), directory=write_tiny_model(tmp_path / "model"))
    for _ in range(2):
        await house.client.chat("some words " * 200)
    for _ in range(2):  # measuring twice counts once
        house.frontend.models.measure(asyncio.get_running_loop().time())
    cached = house.metric("dynamo_frontend_tokenizer_cache_cached_tokens_total", model="m")
    uncached = house.metric("dynamo_frontend_tokenizer_cache_uncached_tokens_total", model="m")
    total = house.metric("dynamo_frontend_input_sequence_tokens_sum", model="m")
    assert house.metric("dynamo_frontend_tokenizer_cache_hits_total") > 0
    assert cached > 0
    assert cached + uncached == total
