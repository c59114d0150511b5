"""Chooses workers for callers that send the prompts themselves, and counts what they sent until they report its end."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from dynamo.bindings.selection.pools import WorkerCatalog, WorkerPool
from dynamo.bindings.selection.records import (
    Chosen,
    PoolName,
    ReservationRequest,
    SelectionCacheConfig,
    SelectionRequest,
    WorkerRecord,
    read,
    refusal,
)
from dynamo.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.kv.hashing import block_hashes, sequence_hashes, to_unsigned
from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.kv_query import KvOverrides, KvQuery
from dynamo.placement.kv_state import Selection
from dynamo.placement.session_affinity import MAX_TTL_SECONDS, SessionBeingBound, SessionLease
from dynamo.router.kv.router import KvRouter
from dynamo.router.standalone.service import overlap_scores

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARE_BOOKINGS: Final = 1024  # that may be remembered beyond twice those that are booked
NO_PEERS: Final = (
    "SelectionService shares nothing with peers: peers of the index and of bookings are not built in dynamo-unified"
)
_DONE: Final = {"status": "ok"}
_NOTHING: Final = Overlap()


class PendingSelections:
    """Selections that wait for their reservation, oldest first; within the bounds of a configuration."""

    def __init__(self, config: SelectionCacheConfig) -> None:
        self._config = config
        self._kept: OrderedDict[tuple[PoolName, str], tuple[Chosen, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, selection_id: str, chosen: Chosen, now: float) -> None:
        """Keep a selection, in place of an earlier one of that id."""
        self.take(chosen.pool, selection_id, now)
        self._kept[chosen.pool, selection_id] = (chosen, now + self._config.ttl_secs)
        self.bytes += chosen.size
        while self._kept:
            expires_at = next(iter(self._kept.values()))[1]
            is_full = len(self._kept) > self._config.max_entries or self.bytes > self._config.max_bytes
            if not is_full and expires_at > now:
                break
            self.bytes -= self._kept.popitem(last=False)[1][0].size

    def take(self, pool: PoolName, selection_id: str, now: float) -> Chosen | None:
        """Return a selection, which is kept no longer; None: there is none, or it is too old."""
        found = self._kept.pop((pool, selection_id), None)
        if found is None:
            return None
        self.bytes -= found[0].size
        return found[0] if found[1] > now else None


class Reservations:
    """Which router counts each reservation. A router may end one by itself: a worker left, or it is too old."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[KvRouter, SessionLease | None]] = {}
        self._sweep_at = SPARE_BOOKINGS

    def __len__(self) -> int:
        return len(self._by_id)

    def check_new(self, selection_id: str, now: float) -> None:
        """Raise SelectionServiceError for an id that is reserved."""
        if self._find(selection_id, now) is not None:
            raise refusal("conflict", f"selection {selection_id} is already reserved or being reserved")

    def add(self, selection_id: str, router: KvRouter, lease: SessionLease | None, now: float) -> None:
        """Take a reservation that its router has booked."""
        self._by_id[selection_id] = (router, lease)
        if len(self._by_id) > self._sweep_at:
            for each in list(self._by_id):
                self._find(each, now)
            self._sweep_at = 2 * len(self._by_id) + SPARE_BOOKINGS

    def router(self, selection_id: str, now: float) -> KvRouter:
        """Return the router of a reservation. Raises SelectionServiceError for one that does not exist."""
        router = self._find(selection_id, now)
        if router is None:
            raise refusal("not_found", f"reservation {selection_id} not found")
        return router

    def end(self, selection_id: str, now: float) -> None:
        """Forget a reservation, and let go of its session."""
        _, lease = self._by_id.pop(selection_id)
        if lease is not None:
            lease.release(now)

    def _find(self, selection_id: str, now: float) -> KvRouter | None:
        found = self._by_id.get(selection_id)
        if found is None or selection_id in found[0].load:
            return None if found is None else found[0]
        self.end(selection_id, now)
        return None


class SelectionService:
    """The selection service in process. Async calls on one event loop; the other calls in any thread."""

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        session_affinity_ttl_secs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`indexer_threads` is checked and has no effect. `clock` is ours, for tests.

        Raises NotImplementedError for peers, ValueError for a number that is out of range.
        """
        if indexer_peers or replica_sync_peers or replica_sync_port is not None:
            raise NotImplementedError(NO_PEERS)
        if indexer_threads < 1:
            raise ValueError(f"indexer_threads must be at least 1, got {indexer_threads}")
        seconds = session_affinity_ttl_secs
        if seconds is not None and not 1 <= seconds <= MAX_TTL_SECONDS:
            raise ValueError(f"session_affinity_ttl_secs must be between 1 and {MAX_TTL_SECONDS:g}, got {seconds}")
        self._lock = threading.RLock()
        self._catalog = WorkerCatalog(self._lock, seconds)
        self._pending = PendingSelections(selection_cache or SelectionCacheConfig())
        self._reservations = Reservations()
        self._clock, self._is_closed = clock, False
        weakref.finalize(self, self._catalog.close).atexit = False

    # -- workers

    async def upsert_worker(self, worker: Mapping[str, object]) -> dict[str, Any]:
        """Register a worker, in place of the one of that id; return its record. Raises ValueError for one that cannot be."""
        with self._open():
            record = read(WorkerRecord, worker)
            self._catalog.put(record)
            return record.shown()

    async def patch_worker(self, worker_id: int, changes: Mapping[str, object]) -> dict[str, Any]:
        """Replace some members of a worker; return its record."""
        with self._open():
            known = msgspec.structs.asdict(self._catalog.worker(worker_id))
            record = read(WorkerRecord, {**known, **changes})
            if record.worker_id != worker_id:
                raise ValueError(f"the worker_id of worker {worker_id} cannot change")
            self._catalog.put(record)
            return record.shown()

    async def delete_worker(self, worker_id: int) -> dict[str, Any]:
        """Remove a worker, with what is booked there."""
        with self._open():
            self._catalog.remove(worker_id)
            return dict(_DONE)

    def list_workers(self, *, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Return the records of all workers, or of those of a model, of a group, of both."""
        with self._open():
            return [
                record.shown()
                for _, record in sorted(self._catalog.workers.items())
                if model_name in (None, record.model_name) and routing_group in (None, record.routing_group)
            ]

    def ready(self) -> dict[str, Any]:
        """Return whether a prompt can go anywhere."""
        with self._open():
            schedulable = sum(1 for _ in self._catalog.schedulable())
            return {
                "ready": schedulable > 0, "schedulable_workers": schedulable, "workers": len(self._catalog.workers)
            }  # fmt: skip

    # -- selections and reservations

    async def select(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Choose a worker; nothing is booked. With a `selection_id` the choice waits for `create_reservation`."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            pool, selection, lease = self._choose(asked, now)
            if lease is not None:
                lease.release(now)
            if asked.selection_id is not None:
                self._pending.put(asked.selection_id, _chosen(asked, selection), now)
            return _answer(asked, pool, selection, asked.selection_id)

    async def select_and_reserve(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Choose a worker, and count the prompt there until `free_reservation`."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            selection_id = str(uuid.uuid4()) if asked.selection_id is None else asked.selection_id
            self._reservations.check_new(selection_id, now)
            pool, selection, lease = self._choose(asked, now)
            chosen = _chosen(asked, selection)
            self._pending.take(asked.pool, selection_id, now)
            self._book(selection_id, pool, chosen, lease)
            return {
                **_answer(asked, pool, selection, selection_id),
                "sequence_hashes": [_signed(each) for each in chosen.sequence],
                "isl_tokens": chosen.prompt_tokens,
                "track_prefill_tokens": asked.track_prefill_tokens,
            }

    async def create_reservation(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Count a prompt where an earlier `select` chose to send it, or, with a `worker_id`, there."""
        with self._open() as now:
            asked = read(ReservationRequest, request)
            selection_id = asked.selection_id
            if selection_id is None:
                raise ValueError("missing field `selection_id`")
            self._reservations.check_new(selection_id, now)
            if asked.worker_id is None:
                chosen = self._pending.take(asked.pool, selection_id, now)
                if chosen is None:
                    reason = "(expired, already used, or never selected)"
                    raise refusal(
                        "not_found", f"no pending selection {selection_id} for {asked.pool} {reason}"
                    )  # fmt: skip
            else:
                chosen = self._explicit(asked, asked.worker_id)
                self._pending.take(asked.pool, selection_id, now)
            pool = self._catalog.pool(asked.pool)
            if chosen.rank not in pool.router.ranks:
                raise refusal("not_found", f"worker {chosen.rank.worker_id} not found")
            self._book(selection_id, pool, chosen, self._lease(pool, chosen.session_id, None, None))
            return _place(asked.pool, pool, chosen.rank, selection_id)

    async def prefill_complete(self, selection_id: str) -> dict[str, Any]:
        """Count the first token of a reservation: its prompt is computed."""
        with self._open() as now:
            self._reservations.router(selection_id, now).first_token(selection_id, now)
            return dict(_DONE)

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> dict[str, Any]:
        """Count one more block of an answer; what the reservation alone holds then weighs `decay_fraction` a block."""
        if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
            raise ValueError("decay_fraction must be between 0.0 and 1.0")
        with self._open() as now:
            self._reservations.router(selection_id, now).load.output_block(selection_id, decay_fraction)
            return dict(_DONE)

    async def free_reservation(self, selection_id: str) -> dict[str, Any]:
        """End a reservation."""
        with self._open() as now:
            self._reservations.router(selection_id, now).free(selection_id, now)
            self._reservations.end(selection_id, now)
            return dict(_DONE)

    # -- what is known

    def loads(self) -> list[dict[str, Any]]:
        """Return the load of each rank. No prompt waits here, so nothing is ever pending."""
        with self._open() as now:
            nothing = KvQuery(sequence=(), prompt_tokens=0)
            return [
                {**_loads(name, pool, nothing, now), "pending_count": 0, "pending_isl_tokens": 0}
                for name, pool in sorted(self._catalog.pools.items())
            ]

    async def potential_loads(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return what the load of each rank would be with a prompt."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            pool = self._catalog.pool(asked.pool)
            return _loads(asked.pool, pool, _query(asked, pool), now)

    async def overlap_scores(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return the blocks of a prompt that each rank holds, by tier, unweighed."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            pool = self._catalog.pool(asked.pool)
            return {**_named(asked.pool), **overlap_scores(pool.router, _query(asked, pool), now)}

    def indexer_snapshot(self) -> list[dict[str, Any]]:
        """Return, for each pool, the KV events that store what its ranks hold."""
        with self._open():
            return [
                {**_named(name), "block_size": pool.block_size, "events": pool.index.chains.events()}
                for name, pool in sorted(self._catalog.pools.items())
            ]

    # -- peers: there are none

    async def register_replica_peer(self, endpoint: str) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(NO_PEERS)

    async def deregister_replica_peer(self, endpoint: str) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(NO_PEERS)

    async def recover_indexer_from_peers(self) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(NO_PEERS)

    def list_replica_peers(self) -> list[str]:
        """Return no peers."""
        return []

    # -- the end

    def shutdown(self) -> None:
        """Serve no call any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._catalog.close()

    async def shutdown_async(self) -> None:
        """Serve no call any more, and wait until no socket is open. Idempotent."""
        self.shutdown()
        await asyncio.sleep(0)  # the sockets are closed in this turn of the event loop

    # -- parts

    @contextmanager
    def _open(self) -> Iterator[float]:
        """Hold the lock for one call, and yield the time. Raises SelectionServiceError after the end."""
        with self._lock:
            if self._is_closed:
                raise refusal("not_ready", "selection service is shutting down")
            yield self._clock()

    def _choose(self, asked: SelectionRequest, now: float) -> tuple[WorkerPool, Selection, SessionLease | None]:
        pool, pin = self._catalog.pool(asked.pool), asked.pinned_worker
        query = _query(asked, pool)
        if pin is not None:
            self._catalog.worker(pin.worker_id)
            query.pinned_worker_id, query.pinned_dp_rank = pin.worker_id, pin.dp_rank
        lease = self._lease(pool, asked.session_id, query.pinned_worker_id, query.pinned_dp_rank)
        if lease is not None and (bound := lease.rank) is not None:
            query.pinned_worker_id, query.pinned_dp_rank = bound
        try:
            return pool, pool.router.select(query, now), lease
        except DynamoException as error:  # no rank is left: the pin, the allowed workers
            if lease is not None:
                lease.release(now)
            raise refusal("not_ready", "no schedulable workers are available") from error

    def _lease(
        self, pool: WorkerPool, session_id: str | None, pinned_worker_id: int | None, pinned_dp_rank: int | None
    ) -> SessionLease | None:
        if pool.sessions is None or not session_id:
            return None
        try:
            found = pool.sessions.acquire(
                session_id, self._clock(), pinned_worker_id=pinned_worker_id, pinned_dp_rank=pinned_dp_rank
            )
        except InvalidArgument as error:
            raise ValueError(str(error)) from error
        except Overloaded as error:
            raise refusal("not_ready", str(error)) from error
        assert not isinstance(found, SessionBeingBound), "a call binds its session before it ends"
        return found

    def _explicit(self, asked: ReservationRequest, worker_id: int) -> Chosen:
        pool = self._catalog.pool(self._catalog.worker(worker_id).pool)
        rank = WorkerRank(worker_id, asked.dp_rank or 0)
        sequence: Sequence[int]
        if asked.token_ids is None and asked.block_hashes is None and asked.sequence_hashes is not None:
            sequence, tokens = [to_unsigned(each) for each in asked.sequence_hashes], asked.isl_tokens
            tokens = len(sequence) * pool.block_size if tokens is None else tokens
        else:
            query = _query(asked, pool)
            assert query.sequence is not None
            sequence = query.sequence if query.tracking_sequence is None else query.tracking_sequence
            tokens = query.prompt_tokens or 0
        left = tokens if asked.effective_prefill_tokens is None else asked.effective_prefill_tokens
        if left > tokens:
            raise ValueError(f"effective_prefill_tokens must not exceed isl_tokens {tokens}, got {left}")
        return Chosen(
            asked.pool, rank, sequence, tokens, tokens - left, asked.track_prefill_tokens, asked.session_id
        )  # fmt: skip

    def _book(self, selection_id: str, pool: WorkerPool, chosen: Chosen, lease: SessionLease | None) -> None:
        now = self._clock()
        if lease is not None and lease.rank is None:
            lease.bind(chosen.rank, now, time.time_ns())
        pool.router.load.add(
            selection_id,
            chosen.rank,
            chosen.sequence,
            prompt_tokens=chosen.prompt_tokens,
            cached_tokens=chosen.cached_tokens,
            now=now,
            counts_prefill=chosen.tracks_prefill,
        )
        self._reservations.add(selection_id, pool.router, lease, now)


def _query(asked: SelectionRequest, pool: WorkerPool) -> KvQuery:
    """Return the prompt of a request, hashed. Raises ValueError for one that is incomplete."""
    size = pool.block_size
    if asked.token_ids is not None:
        blocks = block_hashes(
            asked.token_ids, size, lora_name=asked.lora_name, cache_salt=asked.cache_salt, eagle=pool.is_eagle
        )
        tokens = len(asked.token_ids)
    elif asked.block_hashes is not None:
        blocks = [to_unsigned(each) for each in asked.block_hashes]
        tokens = len(blocks) * size if asked.isl_tokens is None else asked.isl_tokens
        if tokens < len(blocks) * size:
            raise ValueError(f"isl_tokens must be at least {len(blocks) * size} for {len(blocks)} blocks, got {tokens}")
    else:
        raise ValueError("block_hashes is required without token_ids")
    names = asked.sequence_hashes
    if names is not None and len(names) != len(blocks):
        raise ValueError(f"sequence_hashes must name each of {len(blocks)} blocks, got {len(names)}")
    return KvQuery(
        sequence=sequence_hashes(blocks),
        prompt_tokens=tokens,
        tracking_sequence=None if names is None else [to_unsigned(each) for each in names],
        allowed=None if asked.allowed_worker_ids is None else set(asked.allowed_worker_ids),
        overrides=None if asked.track_prefill_tokens else KvOverrides(track_prefill_tokens=False),
    )


def _chosen(asked: SelectionRequest, selection: Selection) -> Chosen:
    return Chosen(
        asked.pool,
        selection.rank,
        selection.tracking_sequence,
        selection.lookup.prompt_tokens,
        selection.cached_tokens,
        asked.track_prefill_tokens,
        asked.session_id,
    )


def _named(pool: PoolName) -> dict[str, Any]:
    return {"model_name": pool.model, "routing_group": pool.routing_group}


def _place(name: PoolName, pool: WorkerPool, rank: WorkerRank, selection_id: str | None) -> dict[str, Any]:
    return {
        **({} if selection_id is None else {"selection_id": selection_id}),
        **_named(name),
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "endpoint": pool.members[rank.worker_id].endpoint,
    }


def _answer(
    asked: SelectionRequest, pool: WorkerPool, selection: Selection, selection_id: str | None
) -> dict[str, Any]:  # fmt: skip
    overlaps = selection.lookup.overlaps
    own = {rank: overlaps.get(rank, _NOTHING) for rank in pool.members[selection.rank.worker_id].ranks}
    gpu = max(each.device for each in own.values())
    cpu = max(each.device + each.host for each in own.values())
    disk = max(each.device + each.host + each.disk for each in own.values())
    size = pool.block_size
    return {
        **_place(asked.pool, pool, selection.rank, selection_id),
        "block_size": size,
        "overlap": {
            "longest_matched": disk * size,
            "gpu": gpu * size,
            "dp": {str(rank.dp_rank): each.device * size for rank, each in own.items()},
            "cpu": cpu * size,
            "disk": disk * size,
        },
        "effective_prefill_tokens": selection.lookup.prompt_tokens - selection.cached_tokens,
        "potential_decode_blocks": round(selection.potential_decode_blocks),
    }


def _loads(name: PoolName, pool: WorkerPool, query: KvQuery, now: float) -> dict[str, Any]:
    unfinished = 1 if (query.prompt_tokens or 0) % pool.block_size else 0  # it counts in no account
    return {
        **_named(name),
        "loads": [
            {
                "worker_id": each.rank.worker_id,
                "dp_rank": each.rank.dp_rank,
                "potential_prefill_tokens": each.potential_prefill_tokens,
                "potential_decode_blocks": round(each.potential_decode_blocks) - unfinished,
                "active_requests": each.active_requests,
            }
            for each in pool.router.potential_loads(query, now)
        ],
    }


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
