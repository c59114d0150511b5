"""The workers of a `SelectionService`, and the pools that they form: a router for each, fed by the engines' own KV events."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence

import msgspec

from dynamo.bindings.selection.records import PoolName, WorkerRecord, refusal
from dynamo.errors import InvalidArgument
from dynamo.kv.block_chains import DumpedIndex
from dynamo.kv.changes import BlockChange, NumberedChange, PublishedEvent
from dynamo.kv.engine_events import EngineEvent
from dynamo.kv.events import RouterEvent
from dynamo.kv.index import PrefixIndex
from dynamo.kv.ledger import KvLedger
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.policies.kv_policies import kv_policy
from dynamo.placement.session_affinity import SessionAffinity
from dynamo.router.kv.router import KvRouter
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics
from dynamo.worker.kv_publishing.publisher import BlockHasher


class EngineFeed:
    """Keeps an index up to date with the blocks of one rank, by what its engine publishes. Made on the event loop."""

    def __init__(self, rank: WorkerRank, address: str, pool: SelectionPool, metrics: KvPublisherMetrics) -> None:
        """Raises InvalidArgument for an address that is not one."""
        from dynamo.worker.kv_publishing.zmq_source import ZmqEngineEvents  # loads ZeroMQ

        self.address, self.pool = address, pool
        self._rank = rank
        self._hasher = BlockHasher(pool.block_size, frozenset())
        self._ledger = KvLedger(self._event, max_events=1)  # counts how often a block was stored; no router is answered
        self._loop = asyncio.get_running_loop()
        self._source = ZmqEngineEvents(address, "", self._take, metrics)

    def end(self) -> None:
        """Stop reading soon. Idempotent; any thread."""
        if self._loop.is_closed():
            self._source.close()
        else:
            self._loop.call_soon_threadsafe(self._source.close)

    def _take(self, events: Sequence[EngineEvent]) -> None:
        changes = self._hasher.changes_of(events)
        with self.pool.lock:
            for tier, change in changes:
                if (event := self._ledger.add(tier, change)) is not None:
                    self.pool.index.apply(msgspec.convert(event, RouterEvent))

    def _event(self, event_id: int, tier: str, data: BlockChange) -> PublishedEvent:
        worker_id, dp_rank = self._rank
        change: NumberedChange = {"event_id": event_id, "data": data, "dp_rank": dp_rank}
        return {"worker_id": worker_id, "storage_tier": tier, "residency_domain": "worker", "event": change}


class SelectionPool:
    """The schedulable workers of one model and routing group."""

    def __init__(self, block_size: int, is_eagle: bool, lock: threading.RLock, affinity_seconds: float | None) -> None:
        self.block_size, self.is_eagle, self.lock = block_size, is_eagle, lock
        self.index = DumpedIndex(PrefixIndex())
        self.members: dict[int, WorkerRecord] = {}
        self.router = KvRouter(
            block_size=block_size, policy=kv_policy("default"), rng=random.Random(), index=self.index.index
        )
        self.sessions: SessionAffinity | None = None
        if affinity_seconds is not None:
            self.sessions = SessionAffinity(
                affinity_seconds, writer_id=0, is_known=lambda rank: rank in self.router.ranks
            )

    def put(self, record: WorkerRecord) -> None:
        """Add a worker, or replace what is known of it."""
        self.members[record.worker_id] = record
        for rank in record.ranks:
            self.index.index.set_capacity(rank, record.total_kv_blocks)
        self._set_ranks()

    def remove(self, worker_id: int) -> None:
        """Remove a worker with its blocks and everything that is booked there."""
        if self.members.pop(worker_id, None) is not None:
            self.index.index.forget(worker_id)
            self._set_ranks()

    def _set_ranks(self) -> None:
        members = self.members.values()
        self.router.set_ranks({rank: record.facts for record in members for rank in record.ranks})


class WorkerCatalog:
    """All workers, schedulable or not, and the pools of those that are. Its caller holds `lock`."""

    def __init__(self, lock: threading.RLock, affinity_seconds: float | None) -> None:
        self.workers: dict[int, WorkerRecord] = {}
        self.pools: dict[PoolName, SelectionPool] = {}  # each has a member
        self._feeds: dict[WorkerRank, EngineFeed] = {}
        self._lock, self._affinity_seconds = lock, affinity_seconds
        self._metrics = KvPublisherMetrics(MetricsRegistry())

    def worker(self, worker_id: int) -> WorkerRecord:
        """Return a worker. Raises SelectionServiceError for one that did not register."""
        record = self.workers.get(worker_id)
        if record is None:
            raise refusal("not_found", f"worker {worker_id} not found")
        return record

    def pool(self, name: PoolName) -> SelectionPool:
        """Return a pool. Raises SelectionServiceError for one without a worker."""
        pool = self.pools.get(name)
        if pool is None:
            raise refusal("not_ready", f"no schedulable workers for {name}")
        return pool

    def put(self, record: WorkerRecord) -> None:
        """Add a worker, or replace the one of that id. Raises ValueError, and changes nothing, for one that cannot be.

        What stays the same keeps what is known of it: the blocks of a rank with its address, the bookings of a rank.
        """
        worker_id, opened = record.worker_id, dict[WorkerRank, EngineFeed]()
        pool = None if record.lacks() else self._pool_for(record)
        if pool is not None:
            try:
                for rank in record.ranks:
                    address, known = record.kv_events_endpoints[rank.dp_rank], self._feeds.get(rank)
                    if known is None or known.pool is not pool or known.address != address:
                        opened[rank] = EngineFeed(rank, address, pool, self._metrics)
            except InvalidArgument as error:
                _end(opened)
                raise ValueError(f"worker {worker_id}: {error}") from error
        kept = set() if pool is None else set(record.ranks) - opened.keys()
        before = self.workers.get(worker_id)
        if before is not None and self.pools.get(before.pool) is not pool:
            self._leave(before)
        for rank in [each for each in self._feeds if each.worker_id == worker_id and each not in kept]:
            feed = self._feeds.pop(rank)
            feed.end()
            feed.pool.index.forget(*rank)
        self._feeds |= opened
        self.workers[worker_id] = record
        if pool is not None:
            self.pools[record.pool] = pool
            pool.put(record)

    def remove(self, worker_id: int) -> None:
        """Remove a worker. Raises SelectionServiceError for one that did not register."""
        self._leave(self.worker(worker_id))
        del self.workers[worker_id]
        _end({rank: self._feeds.pop(rank) for rank in list(self._feeds) if rank.worker_id == worker_id})

    def close(self) -> None:
        """Read no more events, soon. Idempotent; any thread."""
        _end(self._feeds)

    def schedulable(self) -> Iterator[WorkerRecord]:
        """Yield the workers that prompts can go to."""
        for pool in self.pools.values():
            yield from pool.members.values()

    def _pool_for(self, record: WorkerRecord) -> SelectionPool:
        pool, block_size = self.pools.get(record.pool), record.block_size or 0
        if pool is not None:
            if (pool.block_size, pool.is_eagle) == (block_size, record.is_eagle):
                return pool
            if pool.members.keys() != {record.worker_id}:
                shape = f"block_size {pool.block_size} and is_eagle {pool.is_eagle}"
                raise ValueError(f"worker {record.worker_id}: the other workers of {record.pool} have {shape}")
        return SelectionPool(block_size, record.is_eagle, self._lock, self._affinity_seconds)

    def _leave(self, record: WorkerRecord) -> None:
        pool = self.pools.get(record.pool)
        if pool is not None:
            pool.remove(record.worker_id)
            if not pool.members:
                del self.pools[record.pool]


def _end(feeds: dict[WorkerRank, EngineFeed]) -> None:
    for feed in feeds.values():
        feed.end()
