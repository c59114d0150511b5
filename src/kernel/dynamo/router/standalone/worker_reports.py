"""What a router before one endpoint follows of its workers: their KV events, for its index, and their load, for its thresholds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo.kv.block_chains import DumpedIndex
from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import WorkerRank
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv_events.feed import KvEventFeed
from dynamo.router.peers.load_reports import LOAD_TOPIC
from dynamo.router.workers.busy_workers import BusyThresholds, BusyWorkers, LoadReport
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.event_plane.base import Event

if TYPE_CHECKING:
    from dynamo.router.standalone.routed_endpoint import RoutedEndpoint

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(LoadReport)


class IndexOfWorkers:
    """The index of the workers of an endpoint, within the limits on their cards (`index_feed.KvSink`)."""

    __slots__ = ("_degraded", "_index", "_sink", "_workers")

    def __init__(self, sink: PrefixIndex | DumpedIndex, workers: RoutedEndpoint) -> None:
        self._index = sink.index if isinstance(sink, DumpedIndex) else sink
        self._sink, self._workers = sink, workers
        self._degraded = self._index.degraded

    def set_capacities(self) -> None:
        """Bound what each rank may hold by what its worker has."""
        for rank, info in self._workers.router.ranks.items():
            self._index.set_capacity(rank, info.total_kv_blocks)

    def apply(self, event: RouterEvent) -> None:
        """Apply one KV event. See `KvSink`."""
        self._sink.apply(event)
        self._see_degraded()

    def forget(self, worker_id: int, dp_rank: int) -> None:
        """Drop all blocks of a rank. See `KvSink`."""
        self._index.forget(worker_id, dp_rank)
        rank = WorkerRank(worker_id, dp_rank)
        if (info := self._workers.router.ranks.get(rank)) is not None:
            self._index.set_capacity(rank, info.total_kv_blocks)
        self._see_degraded()

    def _see_degraded(self) -> None:
        if self._index.degraded is not self._degraded:
            self._degraded = self._index.degraded
            self._workers.set_degraded(self._degraded)


async def follow_events(workers: RoutedEndpoint, sink: IndexOfWorkers, opened: asyncio.Future[None]) -> None:
    """Follow the KV events of the workers until this is cancelled, or fails. Before `opened` a failure is only that future's."""
    feed = KvEventFeed(workers.endpoint, sink, on_trust=workers.set_trust, is_live=workers.is_live)

    def ranks_changed() -> None:
        sink.set_capacities()
        feed.ranks_changed({*feed.ranks, *workers.router.ranks})

    try:
        async with feed:
            workers.on_ranks = ranks_changed
            if not opened.done():
                opened.set_result(None)
            await asyncio.get_running_loop().create_future()
    except Exception as error:
        workers.on_ranks = None
        feed.forget_all()
        if opened.done():
            raise
        opened.set_exception(error)


class _Pool:
    """The workers of an endpoint as `BusyWorkers` sees them."""

    def __init__(self, workers: RoutedEndpoint) -> None:
        self.name = ""
        self._workers = workers

    @property
    def busy(self) -> frozenset[int]:
        return self._workers.busy

    @busy.setter
    def busy(self, busy: frozenset[int]) -> None:
        self._workers.busy = busy

    @property
    def runtime_config(self) -> ModelRuntimeConfig:
        return self._workers.runtime_config

    @property
    def member_ids(self) -> frozenset[int]:
        return frozenset(self._workers.client.instance_ids())


@asynccontextmanager
async def busy_filter(workers: RoutedEndpoint, thresholds: BusyThresholds | None) -> AsyncIterator[None]:
    """Exclude busy workers for as long as the block runs. Without a threshold nothing is followed."""
    if thresholds is None or not thresholds.is_set:
        yield
        return
    pool, endpoint = _Pool(workers), workers.endpoint
    busy = BusyWorkers(lambda: (pool,), lambda _model: thresholds)
    try:
        async with (
            endpoint.runtime.events.subscribe(endpoint.event_scope, LOAD_TOPIC) as events,
            Background() as follows,
        ):
            follows.keep(partial(_follow, events, busy, pool), "load reports of the workers")
            yield
    finally:
        busy.close()


async def _follow(events: AsyncIterator[Event], busy: BusyWorkers, pool: _Pool) -> None:
    async for event in events:
        try:
            report = _DECODER.decode(event.payload)
        except msgspec.MsgspecError as error:
            logger.warning("a load report is not readable and ignored: %s", error)
            continue
        busy.keep_only(pool.member_ids)
        busy.report(report)
