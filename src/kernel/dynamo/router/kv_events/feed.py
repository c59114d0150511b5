"""The KV events of a model's workers, whole and in order: gaps are seen, and filled by a request to the worker.

A worker that joins gets a request for everything it holds; from then on its events are followed. An event id that is too high is a
gap: the missing events are requested, and live events wait meanwhile. Events that cannot be recovered end nothing: routing goes on
with less, and the trust in the rank is lower.

Only the ranks that are there count, which is up to the cards of their workers. The events of others wait a moment for a card.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Final

from dynamo.kv.events import BadEvents, RouterEvent, read_event, split_events
from dynamo.kv.overlap import WorkerRank
from dynamo.router.kv_events.queues import EarlyEvents
from dynamo.router.kv_events.rank_events import CacheEvents, KvSink, OnTrust, RankEvents, Turns
from dynamo.router.kv_events.sources import MAX_RECOVERIES, RecoveryTarget, SourceClients, read_source
from dynamo.runtime.calls.event_plane.base import Event
from dynamo.runtime.discovery.base import EVENT_SOURCES, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint

__all__ = ["MAX_RECOVERIES", "REFUSALS", "KvEventFeed", "KvSink"]

logger = logging.getLogger(__name__)

TOPIC: Final = "kv-events"
MAX_SOURCES: Final = 65_536  # records that are remembered
SOURCES_AT_ONCE: Final = 64  # records that are read before others on the loop get a turn
WARN_SECONDS: Final = 10.0  # between warnings about what cannot be read

UNREADABLE: Final = "unreadable"
UNKNOWN_RANK: Final = "unknown_rank"
FAILED: Final = "failed"
REFUSALS: Final = (UNREADABLE, UNKNOWN_RANK, FAILED)
"""Why an event is not even tried: not to be decoded, or too large; of a rank that no card names; a fault of this process."""


def _every_rank(_: WorkerRank) -> bool:
    return True


def _uncounted(_: str) -> None:
    return


class _Refusals:
    """What is not tried: counted, and reported from time to time, as the sender of such events may send many."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self.count = count
        self._next_warning = 0.0

    def report(self, reason: str, message: Event, error: Exception) -> None:
        """Count a message that is not read, and log why."""
        self.count(reason)
        now = asyncio.get_running_loop().time()
        level = logging.WARNING if now >= self._next_warning else logging.DEBUG
        if level == logging.WARNING:
            self._next_warning = now + WARN_SECONDS
        traceback = error if reason == FAILED else None
        logger.log(
            level, "a KV event message of publisher %x is not read: %s", message.publisher_id, error, exc_info=traceback
        )


class SourceRecords:
    """The records of event sources, by key, by rank and by the path of their endpoints."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[WorkerRank, RecoveryTarget]] = {}
        self._targets: dict[WorkerRank, dict[str, RecoveryTarget]] = {}  # of each rank, by key
        self._paths: Tally[str] = Tally()

    def put(self, key: str, rank: WorkerRank, target: RecoveryTarget) -> bool:
        """Remember a record; False: there are too many."""
        if key not in self._records and len(self._records) >= MAX_SOURCES:
            return False
        self.pop(key)
        self._records[key] = rank, target
        self._targets.setdefault(rank, {})[key] = target
        self._paths[target.path] += 1
        return True

    def pop(self, key: str) -> tuple[WorkerRank, RecoveryTarget] | None:
        """Forget a record and return what it was; None: it is not known."""
        if (record := self._records.pop(key, None)) is not None:
            del self._targets[record[0]][key]
            if not self._targets[record[0]]:
                del self._targets[record[0]]
            self._paths -= Tally((record[1].path,))
        return record

    def targets(self, rank: WorkerRank) -> Iterable[RecoveryTarget]:
        """Return where the missing events of a rank can be requested."""
        return tuple(self._targets.get(rank, {}).values())

    def has_path(self, target: RecoveryTarget) -> bool:
        """Return whether a record has the path of a target."""
        return target.path in self._paths


class KvEventFeed:
    """`async with KvEventFeed(endpoint, sink): ...` follows until the block is left."""

    def __init__(
        self,
        endpoint: Endpoint,
        sink: KvSink,
        *,
        on_trust: OnTrust | None = None,
        slots: asyncio.Semaphore | None = None,
        is_live: Callable[[WorkerRank], bool] = _every_rank,
        on_refused: Callable[[str], None] = _uncounted,
    ) -> None:
        """`endpoint`: the one whose workers' events are meant. `slots`: shared by feeds that recover side by side.

        `is_live`: whether a rank is there; `ranks_changed` is to be called when that changes. `on_refused`: called with one
        of `REFUSALS` for each event, or message, that is not tried.
        """
        self._endpoint, self._is_live = endpoint, is_live
        self._refusals = _Refusals(on_refused)
        self._clients = SourceClients(endpoint.runtime, slots)
        self._ranks = RankEvents(
            sink, self._clients, lambda work, name: self._group.create_task(work, name=name), on_trust
        )
        self._early = EarlyEvents()
        self._sources = SourceRecords()
        self._stack = AsyncExitStack()

    @property
    def gaps(self) -> int:
        """How often events were missing."""
        return self._ranks.gaps

    @property
    def dumps(self) -> int:
        """How often a rank sent its whole state."""
        return self._ranks.dumps

    @property
    def ranks(self) -> Iterator[WorkerRank]:
        """The ranks that are followed."""
        return iter(self._ranks)

    def counts(self) -> Iterator[tuple[WorkerRank, CacheEvents]]:
        """Yield each rank that is followed, with what its events have come to."""
        return self._ranks.counts()

    async def __aenter__(self) -> KvEventFeed:
        events = await self._stack.enter_async_context(
            self._endpoint.runtime.events.subscribe(self._endpoint.event_scope, TOPIC)
        )
        self._group = group = await self._stack.enter_async_context(asyncio.TaskGroup())
        following = [
            group.create_task(self._follow_events(events), name="kv events"),
            group.create_task(self._follow_sources(), name="kv event sources"),
            group.create_task(self._ranks.recover_after_silence(), name="kv events after a silence"),
        ]

        def end() -> None:
            for task in following:
                task.cancel()
            self._ranks.stop()

        self._stack.callback(end)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        await self._clients.close()

    def ranks_changed(self, ranks: Iterable[WorkerRank]) -> None:
        """Drop those of `ranks` that are no longer there, and begin with those that are there now."""
        for rank in ranks:
            if not self._is_live(rank):
                self._ranks.drop(rank)
                continue
            if rank not in self._ranks:
                for target in self._sources.targets(rank):
                    self._ranks.set_target(rank, target)
            for event in self._early.take(rank):
                self._ranks.take(event)

    def forget_all(self) -> None:
        """Drop every rank: its events are no longer followed."""
        for rank in list(self._ranks):
            self._ranks.drop(rank)

    # -- events ------------------------------------------------------------------------------------------------------

    async def _follow_events(self, events: AsyncIterator[Event]) -> None:
        turns = Turns()
        async for message in events:
            try:
                parts = split_events(message.payload)
            except BadEvents as error:
                self._refusals.report(UNREADABLE, message, error)
                continue
            for part in parts:
                try:
                    event = read_event(part)
                except BadEvents as error:
                    self._refusals.report(UNREADABLE, message, error)
                    continue
                self._take(event, message)
                await turns.spend(event)

    def _take(self, event: RouterEvent, message: Event) -> None:
        rank = WorkerRank(event.worker_id, event.event.dp_rank)
        if rank not in self._ranks and not self._is_live(rank):
            if not self._early.put(rank, event, asyncio.get_running_loop().time()):
                self._refusals.count(UNKNOWN_RANK)
            return
        try:
            self._ranks.take(event)
        except Exception as error:  # the boundary: one event must not end the feed
            self._ranks.drop(rank)
            self._refusals.report(FAILED, message, error)

    # -- sources -----------------------------------------------------------------------------------------------------

    async def _follow_sources(self) -> None:
        prefix = f"{EVENT_SOURCES}/{self._endpoint.event_scope.path_encoded}/topic/{TOPIC}"
        async with aclosing(follow(self._endpoint.runtime.discovery, prefix)) as changes:
            async for batch in changes:
                for number, change in enumerate(batch, 1):
                    await self._source_changed(change)
                    if number % SOURCES_AT_ONCE == 0:
                        await asyncio.sleep(0)

    async def _source_changed(self, change: Change) -> None:
        if isinstance(change, Put):
            try:
                source = read_source(change.value)
            except BadEvents as error:
                logger.warning("KV event source %s is not read: %s", change.key, error)
                return
            if self._sources.put(change.key, source.rank, source.target) and self._is_live(source.rank):
                self._ranks.set_target(source.rank, source.target)
            return
        record = self._sources.pop(change.key)
        if record is None or self._sources.targets(record[0]):
            return
        self._ranks.drop(record[0])
        if not self._sources.has_path(record[1]):
            await self._clients.leave(record[1])
