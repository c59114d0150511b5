"""The first tokens that a lower-level worker reports: a router that booked the request counts its prompt as computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo.kv.overlap import WorkerRank
from dynamo.llm import WorkerType
from dynamo.placement.active_load import ActiveLoad
from dynamo.router.peers.replica_sync import ReplicaSync
from dynamo.runtime import Context, DistributedRuntime
from dynamo.runtime.discovery.file import FileDiscovery
from support.cases import each_case
from support.processes import until

PATH = "ns.c.generate"


@pytest.mark.parametrize("plane", ["mem", "zmq"])
async def test_a_router_counts_the_first_token_that_a_worker_reports(
    plane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE_HOST", "127.0.0.1")

    def runtime() -> DistributedRuntime:
        return DistributedRuntime(None, None, "mem", event_plane=plane, discovery=FileDiscovery(tmp_path))

    async with runtime() as workers, runtime() as routers:
        endpoint, load = workers.endpoint(PATH), ActiveLoad(16)
        rank = WorkerRank(endpoint.connection_id(), 3)
        for name in ("early", "late"):
            load.add(name, rank, (), prompt_tokens=100, cached_tokens=0, now=0.0)
        async with ReplicaSync(routers.endpoint(PATH), load, router_id=7, block_size=16) as sync:
            source: Any = await endpoint.first_token_source(WorkerType.Decode)

            def is_connected() -> bool:  # what is sent before goes nowhere, as over any such socket
                probe = Context("probe")
                source.bind(probe)
                probe.notify_first_token()
                return sync.received > 0

            await until(is_connected)
            early, late, other = Context("early"), Context("late"), Context("other")
            fired: list[str] = []
            early.on_first_token(lambda: fired.append("deferred abort"))  # the framework's own use of the same signal
            for context in (early, late, other):
                source.bind(context, dp_rank=3)

            assert load.of(rank).prefill_tokens == 200
            await asyncio.to_thread(early.notify_first_token)
            await until(lambda: load.of(rank).prefill_tokens == 100)
            for context in (other, late):
                context.notify_first_token()
            await until(lambda: load.of(rank).prefill_tokens == 0)
            assert fired == ["deferred abort"]


@each_case("role", [WorkerType.Prefill, WorkerType.Encode])
async def test_a_worker_that_makes_no_tokens_has_no_source(role: WorkerType) -> None:
    async with DistributedRuntime(None, None, "mem", event_plane="mem") as runtime:
        assert await runtime.endpoint(PATH).first_token_source(role) is None


async def test_a_source_refuses_what_it_cannot_report() -> None:
    async with DistributedRuntime(None, None, "mem", event_plane="mem") as runtime:
        endpoint = runtime.endpoint(PATH)
        with pytest.raises(TypeError, match="worker_type must be a WorkerType, got str"):
            await endpoint.first_token_source("decode")
        source = await endpoint.first_token_source(WorkerType.Aggregated)
        for rank in (-1, True, 2**32):
            with pytest.raises(ValueError, match="dp_rank must be an integer from 0 to"):
                source.bind(Context(), dp_rank=rank)
