"""Chooses workers for callers that send the prompts themselves, and counts what they sent until they report its end."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from dynamo.bindings.selection.answers import (
    PendingSelections,
    Reservations,
    answer,
    chosen_rank,
    loads_of,
    named,
    place,
    query_of,
    signed,
)
from dynamo.bindings.selection.pools import SelectionPool, WorkerCatalog
from dynamo.bindings.selection.records import (
    ChosenRank,
    ReservationRequest,
    SelectionCacheConfig,
    SelectionRequest,
    WorkerRecord,
    read,
    refusal,
)
from dynamo.errors import DynamoException, InvalidArgument, Overloaded
from dynamo.kv.hashing import to_unsigned
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery
from dynamo.placement.kv_state import Selection
from dynamo.placement.session_affinity import MAX_TTL_SECONDS, SessionBeingBound, SessionLease
from dynamo.router.standalone.service import overlap_scores

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_PEERS: Final = (
    "SelectionService shares nothing with peers: peers of the index and of bookings are not built in dynamo-unified"
)
_DONE: Final = {"status": "ok"}


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
                self._pending.put(asked.selection_id, chosen_rank(asked, selection), now)
            return answer(asked, pool, selection, asked.selection_id)

    async def select_and_reserve(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Choose a worker, and count the prompt there until `free_reservation`."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            selection_id = str(uuid.uuid4()) if asked.selection_id is None else asked.selection_id
            self._reservations.check_new(selection_id, now)
            pool, selection, lease = self._choose(asked, now)
            chosen = chosen_rank(asked, selection)
            self._pending.take(asked.pool, selection_id, now)
            self._book(selection_id, pool, chosen, lease)
            return {
                **answer(asked, pool, selection, selection_id),
                "sequence_hashes": [signed(each) for each in chosen.sequence],
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
            return place(asked.pool, pool, chosen.rank, selection_id)

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
                {**loads_of(name, pool, nothing, now), "pending_count": 0, "pending_isl_tokens": 0}
                for name, pool in sorted(self._catalog.pools.items())
            ]

    async def potential_loads(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return what the load of each rank would be with a prompt."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            pool = self._catalog.pool(asked.pool)
            return loads_of(asked.pool, pool, query_of(asked, pool), now)

    async def overlap_scores(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return the blocks of a prompt that each rank holds, by tier, unweighed."""
        with self._open() as now:
            asked = read(SelectionRequest, request)
            pool = self._catalog.pool(asked.pool)
            return {**named(asked.pool), **overlap_scores(pool.router, query_of(asked, pool), now)}

    def indexer_snapshot(self) -> list[dict[str, Any]]:
        """Return, for each pool, the KV events that store what its ranks hold."""
        with self._open():
            return [
                {**named(name), "block_size": pool.block_size, "events": pool.index.chains.events()}
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

    def _choose(self, asked: SelectionRequest, now: float) -> tuple[SelectionPool, Selection, SessionLease | None]:
        pool, pin = self._catalog.pool(asked.pool), asked.pinned_worker
        query = query_of(asked, pool)
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
        self, pool: SelectionPool, session_id: str | None, pinned_worker_id: int | None, pinned_dp_rank: int | None
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

    def _explicit(self, asked: ReservationRequest, worker_id: int) -> ChosenRank:
        pool = self._catalog.pool(self._catalog.worker(worker_id).pool)
        rank = WorkerRank(worker_id, asked.dp_rank or 0)
        sequence: Sequence[int]
        if asked.token_ids is None and asked.block_hashes is None and asked.sequence_hashes is not None:
            sequence, tokens = [to_unsigned(each) for each in asked.sequence_hashes], asked.isl_tokens
            tokens = len(sequence) * pool.block_size if tokens is None else tokens
        else:
            query = query_of(asked, pool)
            assert query.sequence is not None
            sequence = query.sequence if query.tracking_sequence is None else query.tracking_sequence
            tokens = query.prompt_tokens or 0
        left = tokens if asked.effective_prefill_tokens is None else asked.effective_prefill_tokens
        if left > tokens:
            raise ValueError(f"effective_prefill_tokens must not exceed isl_tokens {tokens}, got {left}")
        return ChosenRank(
            asked.pool, rank, sequence, tokens, tokens - left, asked.track_prefill_tokens, asked.session_id
        )  # fmt: skip

    def _book(self, selection_id: str, pool: SelectionPool, chosen: ChosenRank, lease: SessionLease | None) -> None:
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
