"""Two discovery records claim one worker id: requests go to the worker that lives."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from support.frontend_cluster import Cluster, cluster, say


async def put_instance(house: Cluster, key: str, instance_id: int, component: str = "backend") -> None:
    record = {
        "type": "Endpoint",
        "component": component,
        "endpoint": "generate",
        "namespace": "ns",
        "instance_id": instance_id,
        "transport": {"mem": "nobody/serves/this"},
    }
    await house.frontend.kernel.runtime.discovery.put(
        f"{INSTANCES}/ns/{component}/generate/{key}", msgspec.json.encode(record)
    )


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("key", ["foreign", "0"])
async def test_a_foreign_record_of_a_workers_id_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int, key: str
) -> None:
    async with cluster(tmp_path) as house:
        real = [await house.worker(say("hello")) for _ in range(workers)]
        for worker in real:
            await put_instance(house, f"{key}{worker.endpoint.connection_id()}", worker.endpoint.connection_id())
        await house.frontend.models.wait_for(lambda: len(house.frontend.models.instances()) == 2 * workers)
        for _ in range(20):
            assert (await house.client.chat("hi")).status == 200
        assert house.metric("dynamo_request_plane_quarantines_total") == 0
    collisions = [record for record in caplog.records if "claim instance id" in record.message]
    assert [record.levelno for record in collisions] == [logging.ERROR] * workers


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_workers_id_on_another_endpoint_costs_no_request(tmp_path: Path, workers: int) -> None:
    """A foreign card and instance of the same model and id, elsewhere: it fails and is left out, the worker itself is not."""
    async with cluster(tmp_path) as house:
        real = [await house.worker(say("hello")) for _ in range(workers)]
        store = house.frontend.kernel.runtime.discovery
        for worker in real:
            own = worker.endpoint.connection_id()
            (card,) = [value for key, value in (await store.get_prefix(MODEL_CARDS)).items() if f"{own:x}" in key]
            foreign = msgspec.json.decode(card)
            foreign["component"] = "foreign"
            await put_instance(house, f"{own:x}", own, "foreign")
            await store.put(f"{MODEL_CARDS}/ns/foreign/generate/{own:x}", msgspec.json.encode(foreign))
        (model,) = house.frontend.models.served()
        await house.frontend.models.wait_for(lambda: len(model.candidates()) == 2 * workers)
        for _ in range(20):
            assert (await house.client.chat("hi")).status == 200


async def test_the_record_of_a_worker_that_came_later_is_found_behind_the_foreign_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker(say("hello"))
        own = worker.endpoint.connection_id()
        store = house.frontend.kernel.runtime.discovery
        key = f"{INSTANCES}/ns/backend/generate/{own:x}"
        record = (await store.get_prefix(key))[key]
        await put_instance(house, f"{own:x}", own)  # the worker's own key, taken over
        await store.put(f"{INSTANCES}/ns/backend/generate/moved", record)
        await house.frontend.models.wait_for(lambda: len(house.frontend.models.instances()) == 2)
        for _ in range(5):
            assert (await house.client.chat("hi")).status == 200
        assert len(worker.requests) == 5
