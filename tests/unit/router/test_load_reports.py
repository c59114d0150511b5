"""A router's account, reported as load: what changed, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.router.peers.load_reports import LOAD_TOPIC, RouterLoadReports
from dynamo.runtime.discovery.file import FileDiscovery
from dynamo.runtime.distributed import DistributedRuntime

A, B = WorkerRank(1), WorkerRank(2, 3)


async def test_a_report_goes_out_for_each_rank_that_changed(tmp_path: Path) -> None:
    load = ActiveLoad(16)
    async with DistributedRuntime(None, None, "mem", event_plane="mem", discovery=FileDiscovery(tmp_path)) as runtime:
        endpoint = runtime.endpoint("ns.c.generate")
        async with (
            runtime.events.subscribe(endpoint.event_scope, LOAD_TOPIC) as events,
            RouterLoadReports(endpoint, load) as reports,
        ):

            async def reported() -> Any:
                return msgspec.msgpack.decode((await anext(events)).payload)

            assert reports.report_changes() == 0
            load.add("r", B, [1, 2, 3], prompt_tokens=50, cached_tokens=10, now=0.0)
            found = await reported()  # by itself, within 100 ms
            assert list(found) == [
                "worker_id", "dp_rank", "active_decode_blocks", "active_prefill_tokens", "kv_used_blocks",
            ]  # fmt: skip
            assert list(found.values()) == [2, 3, 3, 40, None]
            load.add("s", A, [1], prompt_tokens=20, cached_tokens=0, now=0.0)
            load.prefill_completed("r", 1.0)
            assert reports.report_changes() == 2
            assert reports.report_changes() == 0
            assert [list((await reported()).values())[:4] for _ in range(2)] == [[2, 3, 3, 0], [1, 0, 1, 20]]
            load.free("s", 2.0)
            assert reports.report_changes() == 1
            assert list((await reported()).values())[:4] == [1, 0, 0, 0]
            load.forget(2)
            assert reports.report_changes() == 0
            assert B not in reports._reported
