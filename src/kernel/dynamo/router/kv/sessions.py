"""Sessions that stay with their worker: the event loop's side of `placement.session_affinity`, beside a pool of workers.

A request holds its session from the choice of its worker to the end of its answer (`SessionHold`). The first request of a session
binds it where it was sent; requests of the session that come meanwhile wait for that. A binding that cannot be kept (its worker
has gone, has failed, or is over a busy threshold) costs a request nothing but the detour.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from dynamo.errors import Cancelled, DynamoException, rule_of
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.session_affinity import (
    AffinityMode,
    AffinityRecord,
    SessionAffinity,
    SessionBeingBound,
    SessionLease,
)
from dynamo.runtime.calls.context import Context, on_loop

if TYPE_CHECKING:
    from dynamo.router.peers.replica_sync import SessionSync

MAX_REAP_SECONDS: Final = 30.0


def session_id_of(body: Mapping[str, object]) -> str | None:
    """Return the session that a worker's request belongs to; None: none."""
    agent = body.get("agent_context")
    found = agent.get("session_id") if isinstance(agent, dict) else None
    return found.strip() or None if isinstance(found, str) else None


class PoolSessions:
    """The sessions of one pool of workers. Used on one event loop."""

    __slots__ = ("__weakref__", "_report", "_waiters", "is_known", "table")

    def __init__(
        self,
        ttl_seconds: float,
        mode: str,
        *,
        writer_id: int,
        is_known: Callable[[WorkerRank], bool],
        report: Callable[[AffinityRecord], None] | None = None,
    ) -> None:
        """`is_known`: whether a rank of the pool exists now. `report`: gets each binding that was made, used or let go."""
        self.table = SessionAffinity(
            ttl_seconds, writer_id=writer_id, is_known=is_known, mode=AffinityMode(mode), on_settled=self._settled
        )
        self.is_known = is_known
        self._report = report
        # Requests that wait for their session to be bound, by session; bounded by the requests in flight.
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait for their session to be bound."""
        return sum(map(len, self._waiters.values()))

    def bound_rank(self, body: Mapping[str, object]) -> WorkerRank | None:
        """Return where the session of a request is bound now; nothing is held."""
        session_id = session_id_of(body)
        return None if session_id is None else self.table.bound_rank(session_id, _now())

    async def hold(
        self,
        session_id: str,
        context: Context,
        *,
        pinned_worker_id: int | None = None,
        pinned_dp_rank: int | None = None,
    ) -> SessionHold:
        """Return a request's hold on its session, once the session is bound or this request is to bind it.

        Raises:
            InvalidArgument: the id is too long, or the request names another worker than the one that the session is
                bound to.
            SessionLimitReached: the session is new, and there are too many.
            Cancelled: the request was cancelled while it waited.
        """
        while True:
            found = self.table.acquire(
                session_id, _now(), pinned_worker_id=pinned_worker_id, pinned_dp_rank=pinned_dp_rank
            )
            if not isinstance(found, SessionBeingBound):
                return SessionHold(self, found)
            await self._until_settled(session_id, context)
            if context.is_stopped():
                raise Cancelled("the request was cancelled while its session was being bound")

    def report(self, record: AffinityRecord | None) -> None:
        """Report a binding to the other routers; None: there is nothing to report."""
        if record is not None and self._report is not None:
            self._report(record)

    async def _until_settled(self, session_id: str, context: Context) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.setdefault(session_id, []).append(waiter)

        def wake(_killed: bool = False) -> None:
            if not waiter.done():
                waiter.set_result(None)

        forget = context.on_cancel(on_loop(loop, wake))
        try:
            await waiter
        finally:
            forget()
            left = self._waiters.get(session_id)
            if left is not None and waiter in left:  # it leaves before the session is settled
                left.remove(waiter)
                if not left:
                    del self._waiters[session_id]

    def _settled(self, session_id: str) -> None:
        for waiter in self._waiters.pop(session_id, ()):
            if not waiter.done():
                waiter.set_result(None)


class SessionHold:
    """What one request holds of its session. End it with `release`, however the request ended; that is idempotent."""

    __slots__ = ("_is_elsewhere", "_lease", "_sessions")

    def __init__(self, sessions: PoolSessions, lease: SessionLease) -> None:
        self._sessions, self._lease = sessions, lease
        self._is_elsewhere = False

    @property
    def rank(self) -> WorkerRank | None:
        """Where the request should go; None: it may go anywhere."""
        rank = None if self._is_elsewhere else self._lease.rank
        return rank if rank is not None and self._sessions.is_known(rank) else None

    @property
    def may_go_elsewhere(self) -> bool:
        """Whether the bound rank is only preferred."""
        return self._sessions.table.mode is AffinityMode.SOFT and self.rank is not None

    def go_elsewhere(self) -> None:
        """Leave the bound rank aside for this request."""
        self._is_elsewhere = True

    def sent(self, worker_id: int, dp_rank: int | None) -> None:
        """Bind the session to where its request was sent. A hard binding to another rank stays as it is."""
        rank, bound = WorkerRank(worker_id, dp_rank or 0), self._lease.rank
        if bound is None or bound == rank or self._sessions.table.mode is AffinityMode.SOFT:
            self._sessions.report(self._lease.bind(rank, _now(), time.time_ns()))

    def failed(self, worker_id: int, error: DynamoException) -> None:
        """End the binding to a worker that failed; what another worker would not do better leaves it alone."""
        bound = self._lease.rank
        if bound is not None and bound.worker_id == worker_id and rule_of(error).retryable:
            self._lease.fail()

    def release(self) -> None:
        """Let the session go; its idle time begins with the last request that does so."""
        self._sessions.report(self._lease.release(_now()))


class SessionRelay:
    """The sessions of the pools that share workers, beside those of other routers: what `SessionSync` takes."""

    __slots__ = ("_endpoint_of", "pools", "syncs")

    def __init__(self, endpoint_of: Callable[[int], str | None]) -> None:
        """`endpoint_of`: from a worker's id to its endpoint; None: the worker has gone."""
        self._endpoint_of = endpoint_of
        self.pools: WeakValueDictionary[str, PoolSessions] = WeakValueDictionary()  # by model
        self.syncs: dict[str, SessionSync] = {}  # by endpoint

    def report(self, record: AffinityRecord) -> None:
        """Pass a binding on to the routers of its worker."""
        endpoint = self._endpoint_of(record.worker_id)
        sync = None if endpoint is None else self.syncs.get(endpoint)
        if sync is not None:
            sync.report(record)

    def advise(self, record: AffinityRecord, now: float) -> bool:
        """Take what another router reports; return whether any pool uses it."""
        used = [pool.table.advise(record, now) for pool in list(self.pools.values())]
        return any(used)

    @property
    def reap_seconds(self) -> float:
        """How often `reap` is to be called."""
        return min((pool.table.reap_seconds for pool in list(self.pools.values())), default=MAX_REAP_SECONDS)

    def reap(self, now: float) -> int:
        """Drop the sessions that have been idle for too long; return how many."""
        return sum(pool.table.reap(now) for pool in list(self.pools.values()))


def _now() -> float:
    return asyncio.get_running_loop().time()
