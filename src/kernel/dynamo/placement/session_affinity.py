"""Which rank serves a session: bindings that last while the session is in use, and some time longer. Pure.

A session is free, being bound, or bound:

    free --acquire--> BINDING --bind--> BOUND
    BINDING --fail, release--> free             the request that would have bound it never got a worker
    BOUND --bind--> BOUND                       elsewhere, where the mode is soft
    BOUND --fail, unknown rank, TTL without a lease--> free

Every request of a session holds a lease. While there is one, the binding cannot expire. Time is an argument, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument, Overloaded
from dynamo.kv.overlap import WorkerRank

MAX_SESSIONS: Final = 65_536
MAX_SESSION_ID_BYTES: Final = 256
MIN_TTL_SECONDS: Final = 1
MAX_TTL_SECONDS: Final = 31_536_000
MAX_REAP_SECONDS: Final = 30.0


class AffinityMode(StrEnum):
    """What a binding means; the values are those of `--router-session-affinity-mode`."""

    HARD = "hard"
    """Requests go exactly to the bound rank."""
    SOFT = "soft"
    """The bound rank is preferred; a request that is served elsewhere takes the binding along."""


class SessionLimitReached(Overloaded):
    """No further session can be bound before one expires."""

    def __init__(self) -> None:
        super().__init__("session affinity entry limit reached")


class SessionBeingBound(msgspec.Struct, frozen=True):
    """Another request of the session is about to bind it: acquire again when the session is settled."""

    session_id: str


class AffinityRecord(msgspec.Struct, frozen=True):
    """A binding as routers report it to each other."""

    session_id: str
    worker_id: int
    dp_rank: int
    sequence: int  # when it was bound, in nanoseconds; a refresh keeps it
    writer_id: int  # the router that bound it

    @property
    def rank(self) -> WorkerRank:
        return WorkerRank(self.worker_id, self.dp_rank)


class _Session:
    """One session in the table. A session that left the table never comes back: its leases then change nothing."""

    __slots__ = ("leases", "record")

    def __init__(self) -> None:
        self.record: AffinityRecord | None = None  # None: being bound
        self.leases = 0


class SessionAffinity:
    """The sessions of one pool of workers. Prefill and decode workers need a table each."""

    def __init__(
        self,
        ttl_seconds: float,
        *,
        writer_id: int,
        is_known: Callable[[WorkerRank], bool],
        mode: AffinityMode = AffinityMode.HARD,
        max_sessions: int = MAX_SESSIONS,
        on_settled: Callable[[str], None] | None = None,
    ) -> None:
        """`is_known`: whether a rank exists now. `on_settled` is called with the id of a session that is no longer being
        bound, so that requests that wait for it can acquire it again.
        """
        if not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
            raise ValueError(
                f"ttl_seconds must be between {MIN_TTL_SECONDS} and {MAX_TTL_SECONDS}, got {ttl_seconds:g}"
            )
        self.mode = mode
        self.ttl_seconds = ttl_seconds
        self.writer_id = writer_id
        self._is_known = is_known
        self._max_sessions = max_sessions
        self._on_settled = on_settled
        self._sessions: dict[str, _Session] = {}
        self._advised: set[str] = set()  # sessions that no request has used here
        self._idle: OrderedDict[str, float] = OrderedDict()  # sessions without a lease, and when each expires: in order

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def reap_seconds(self) -> float:
        """How often `reap` is to be called."""
        return min(self.ttl_seconds, MAX_REAP_SECONDS)

    def acquire(
        self, session_id: str, now: float, *, pinned_worker_id: int | None = None, pinned_dp_rank: int | None = None
    ) -> SessionLease | SessionBeingBound:
        """Return a lease for a request of the session, or that the request has to wait.

        `lease.rank` is where the session is bound, None: nowhere yet, so this request binds it.

        Raises:
            InvalidArgument: the id is too long, or the request names another worker than the one that the session is
                bound to (a hard binding only).
            SessionLimitReached: the session is new, and there are too many.
        """
        size = len(session_id.encode(errors="surrogatepass"))
        if size > MAX_SESSION_ID_BYTES:
            raise InvalidArgument(f"session id of {size} bytes: at most {MAX_SESSION_ID_BYTES} are allowed")
        session = self._live(session_id, now)
        if session is None:
            session = self._add(session_id, now)
        elif session.record is None:
            return SessionBeingBound(session_id)
        elif self.mode is AffinityMode.HARD:
            _check_pin(session.record, pinned_worker_id, pinned_dp_rank)
        session.leases += 1
        self._advised.discard(session_id)
        self._idle.pop(session_id, None)
        return SessionLease(self, session_id, session)

    def advise(self, record: AffinityRecord, now: float) -> bool:
        """Take what another router reports; return whether it made or prolonged a binding here.

        A report is advice: a binding that lives stays, and a rank that is not known here is ignored. Sessions that are known
        by advice alone take no more than half of the table: the rest is for those of this router.
        """
        if len(record.session_id.encode(errors="surrogatepass")) > MAX_SESSION_ID_BYTES:
            return False
        session = self._live(record.session_id, now)
        if session is not None:
            if session.record is None or session.record.rank != record.rank:
                return False
            if not session.leases:
                self._rest(record.session_id, now)
            return True
        if not self._is_known(record.rank):
            return False
        self.reap(now)
        if len(self._sessions) >= self._max_sessions or len(self._advised) >= self._max_sessions // 2:
            return False
        self._advised.add(record.session_id)
        session = self._sessions[record.session_id] = _Session()
        session.record = record
        self._rest(record.session_id, now)
        return True

    def bound_rank(self, session_id: str, now: float) -> WorkerRank | None:
        """Return where a session is bound, without a lease on it."""
        session = self._live(session_id, now)
        return None if session is None or session.record is None else session.record.rank

    def reap(self, now: float) -> int:
        """Drop the sessions that have been without a lease for the TTL; return how many."""
        count = 0
        while self._idle:
            session_id, expires_at = next(iter(self._idle.items()))
            if expires_at > now:
                break
            self._drop(session_id)
            count += 1
        return count

    # -- for leases

    def _is_current(self, session_id: str, session: _Session) -> bool:
        return self._sessions.get(session_id) is session

    def _bind(self, session_id: str, session: _Session, rank: WorkerRank, now_ns: int) -> AffinityRecord:
        record = session.record
        if record is None or record.rank != rank:
            was_unbound = record is None
            record = AffinityRecord(session_id, rank.worker_id, rank.dp_rank, now_ns, self.writer_id)
            session.record = record
            if was_unbound:
                self._settled(session_id)
        return record

    def _end_lease(self, session_id: str, session: _Session, now: float) -> AffinityRecord | None:
        session.leases -= 1
        if not self._is_current(session_id, session):
            return None
        if session.record is None:
            self._drop(session_id)
        elif not session.leases:
            self._rest(session_id, now)
        return session.record

    def _rebind(self, session_id: str, now: float) -> _Session | None:
        """Return a new session for a request that lost its own; None where another request was faster, or the table is
        full.
        """
        if self._live(session_id, now) is not None:
            return None
        try:
            session = self._add(session_id, now)
        except SessionLimitReached:
            return None
        session.leases = 1
        return session

    # -- the table

    def _live(self, session_id: str, now: float) -> _Session | None:
        """Return the session unless it is expired or its rank is gone; such a session is dropped."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        is_expired = self._idle.get(session_id, now + 1.0) <= now
        if is_expired or (session.record is not None and not self._is_known(session.record.rank)):
            self._drop(session_id)
            return None
        return session

    def _add(self, session_id: str, now: float) -> _Session:
        if len(self._sessions) >= self._max_sessions:
            self.reap(now)
            if len(self._sessions) >= self._max_sessions:
                raise SessionLimitReached
        session = self._sessions[session_id] = _Session()
        return session

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._advised.discard(session_id)
        self._idle.pop(session_id, None)
        if session.record is None:
            self._settled(session_id)

    def _rest(self, session_id: str, now: float) -> None:
        """Start the idle timer."""
        self._idle[session_id] = now + self.ttl_seconds
        self._idle.move_to_end(session_id)

    def _settled(self, session_id: str) -> None:
        if self._on_settled is not None:
            self._on_settled(session_id)


class SessionLease:
    """One request's hold on its session. End it with `release`, however the request ended; that is idempotent."""

    __slots__ = ("_affinity", "_has_ended", "_session", "session_id")

    def __init__(self, affinity: SessionAffinity, session_id: str, session: _Session) -> None:
        self._affinity, self.session_id, self._session = affinity, session_id, session
        self._has_ended = False

    @property
    def rank(self) -> WorkerRank | None:
        """Where the session is bound; None: nowhere, and this request may go anywhere."""
        record = self._session.record
        if record is None or not self._affinity._is_current(self.session_id, self._session):
            return None
        return record.rank

    def bind(self, rank: WorkerRank, now: float, now_ns: int) -> AffinityRecord | None:
        """Bind the session to `rank`, where its request was dispatched; return the record to report to other routers.

        `now_ns` is the wall clock, by which routers compare bindings. A session that was lost meanwhile is bound anew,
        unless another request has done so or the table is full: then there is nothing to report.
        """
        if self._has_ended:
            return None
        affinity = self._affinity
        if not affinity._is_current(self.session_id, self._session):
            session = affinity._rebind(self.session_id, now)
            if session is None:
                return None
            self._session = session
        return affinity._bind(self.session_id, self._session, rank, now_ns)

    def fail(self) -> None:
        """End the binding: the worker failed, which a cancellation is not."""
        if not self._has_ended and self._affinity._is_current(self.session_id, self._session):
            self._affinity._drop(self.session_id)

    def release(self, now: float) -> AffinityRecord | None:
        """End the lease; return the record to report to the other routers, None: there is none."""
        if self._has_ended:
            return None
        self._has_ended = True
        return self._affinity._end_lease(self.session_id, self._session, now)


def _check_pin(record: AffinityRecord, worker_id: int | None, dp_rank: int | None) -> None:
    session, bound = record.session_id, record.worker_id
    if worker_id is not None and worker_id != bound:
        raise InvalidArgument(f"session {session} is bound to worker {bound}, not {worker_id}")
    if dp_rank is not None and dp_rank != record.dp_rank:
        raise InvalidArgument(f"session {session} is bound to rank {record.dp_rank} of worker {bound}, not {dp_rank}")
