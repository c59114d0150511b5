"""Keeps requests away from workers whose load is above the thresholds of a `KvRouter`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.peers.load_reports import LOAD_TOPIC
from dynamo.router.standalone.routed_endpoint import RoutedEndpoint
from dynamo.router.workers.busy_workers import BusyThresholds, BusyWorkers, LoadReport
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.event_plane.base import Event

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(LoadReport)


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
            follows.start(_follow(events, busy, pool), "load reports of the workers")
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
