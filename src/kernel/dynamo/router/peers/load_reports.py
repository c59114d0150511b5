"""A router's own account of the ranks, reported like the load of a worker: every 100 ms, what has changed since.

The frontends of the cluster, this one and native ones, read the reports on `kv_metrics` for their busy thresholds and gauges.
"""

from __future__ import annotations

import asyncio
from typing import Final, Self

import msgspec

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.event_plane.base import EventPublisher
from dynamo.runtime.endpoint import Endpoint

LOAD_TOPIC: Final = "kv_metrics"
INTERVAL_SECONDS: Final = 0.1

_encode: Final = msgspec.msgpack.Encoder().encode


class _RouterLoad(msgspec.Struct, frozen=True, gc=False):
    worker_id: int
    dp_rank: int
    active_decode_blocks: int
    active_prefill_tokens: int
    kv_used_blocks: None = None  # what the worker itself counts: a router does not know it


class RouterLoadReports:
    """Reports an account to the event plane of the workers' endpoint. Use as `async with`."""

    def __init__(self, endpoint: Endpoint, load: ActiveLoad) -> None:
        self._endpoint, self._load = endpoint, load
        self._publisher: EventPublisher | None = None
        self._background = Background()
        self._reported: dict[WorkerRank, tuple[int, int]] = {}  # of the ranks that have an account

    async def __aenter__(self) -> Self:
        self._publisher = self._endpoint.runtime.events.new_publisher(self._endpoint.event_scope, LOAD_TOPIC)
        self._background.keep(self._run, "load reports of the router")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._background.close()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close()

    def report_changes(self) -> int:
        """Report the ranks whose load has changed since the last report; return how many."""
        load, publisher, count = self._load, self._publisher, 0
        if publisher is None:
            return 0
        ranks = load.ranks()
        for rank in ranks:
            account = load.of(rank)
            figures = (round(account.decode_blocks), account.prefill_tokens)
            if self._reported.get(rank, (0, 0)) != figures:
                self._reported[rank] = figures
                publisher.publish(_encode(_RouterLoad(*rank, *figures)))
                count += 1
        if len(self._reported) > len(ranks):
            for gone in self._reported.keys() - set(ranks):
                del self._reported[gone]
        return count

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.report_changes()
