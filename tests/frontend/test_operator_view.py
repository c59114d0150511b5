"""What an operator reads at `/health` and `/metrics` of a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.frontend_cluster import Cluster, cluster


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


async def test_health_names_a_discovery_store_that_does_not_answer(
    house: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.worker()
    assert "degraded" not in (await house.client.get("/health")).json
    monkeypatch.setattr(house.frontend.models._discovery, "trouble", lambda: "etcd at e does not answer")
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
