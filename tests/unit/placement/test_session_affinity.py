"""Session affinity: who binds a session, how long the binding lasts, what other routers' reports change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument, Overloaded
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.session_affinity import (
    AffinityMode,
    AffinityRecord,
    SessionAffinity,
    SessionBeingBound,
    SessionLease,
    SessionLimitReached,
)
from support.properties import examples

A, B = WorkerRank(1, 0), WorkerRank(2, 1)
TTL = 10.0


class Table(SessionAffinity):
    """A table whose known ranks a test changes, and which remembers what it settled."""

    def __init__(self, ttl: float = TTL, mode: AffinityMode = AffinityMode.HARD, max_sessions: int = 65_536) -> None:
        self.known = {A, B}
        self.settled: list[str] = []
        super().__init__(
            ttl,
            writer_id=77,
            is_known=lambda rank: rank in self.known,
            mode=mode,
            max_sessions=max_sessions,
            on_settled=self.settled.append,
        )

    def lease(self, session_id: str = "s", now: float = 0.0) -> SessionLease:
        found = self.acquire(session_id, now)
        assert isinstance(found, SessionLease)
        return found


def bound(table: Table, rank: WorkerRank = A, now: float = 0.0, session_id: str = "s") -> SessionLease:
    lease = table.lease(session_id, now)
    assert lease.rank is None
    assert lease.bind(rank, now, now_ns=int(now * 1e9)) is not None
    return lease


def test_the_first_dispatch_binds_and_later_requests_go_there() -> None:
    table = Table()
    first = table.lease()
    assert first.rank is None
    assert first.bind(B, 0.0, 5) == AffinityRecord("s", 2, 1, 5, 77)
    second = table.lease(now=1.0)
    assert second.rank == B
    assert second.bind(B, 1.0, 9) == AffinityRecord("s", 2, 1, 5, 77)  # a refresh keeps the time of the binding
    assert table.lease("other").rank is None


def test_a_binding_expires_a_ttl_after_its_last_lease_and_never_under_one() -> None:
    table = Table()
    first, second = bound(table), table.lease()
    assert first.release(1.0) is not None
    assert first.release(1.0) is None
    assert table.reap(1000.0) == 0
    assert table.bound_rank("s", 1000.0) == A
    second.release(1000.0)
    assert table.bound_rank("s", 1009.9) == A
    assert table.bound_rank("s", 1010.0) is None
    assert len(table) == 0


def test_requests_wait_for_a_session_that_is_being_bound() -> None:
    for end in ("bind", "fail", "release"):
        table = Table()
        first = table.lease()
        assert table.acquire("s", 0.0) == SessionBeingBound("s")
        match end:
            case "bind":
                first.bind(A, 0.0, 1)
            case "fail":
                first.fail()
            case _:
                assert first.release(0.0) is None
        assert table.settled == ["s"]
        assert table.lease().rank == (A if end == "bind" else None)


def test_a_failure_ends_the_binding_for_all_and_the_request_may_bind_it_elsewhere() -> None:
    table = Table()
    first, other = bound(table), table.lease()
    first.fail()
    assert (first.rank, other.rank) == (None, None)
    assert first.bind(B, 1.0, 8) == AffinityRecord("s", 2, 1, 8, 77)
    assert table.lease(now=1.0).rank == B
    other.fail()  # of the binding that is gone already
    assert other.release(2.0) is None
    assert table.bound_rank("s", 2.0) == B
    late = bound(table, session_id="t")
    taken = table.lease("t")
    late.fail()
    bound(table, B, session_id="t")
    assert taken.bind(A, 1.0, 2) is None  # another request was faster
    assert table.bound_rank("t", 1.0) == B


def test_a_worker_that_left_binds_nobody() -> None:
    table = Table()
    bound(table).release(0.0)
    table.known.discard(A)
    assert table.lease().rank is None


def test_a_hard_binding_contradicts_a_request_that_names_another_worker() -> None:
    table = Table()
    bound(table, B)
    with pytest.raises(InvalidArgument, match=r"^session s is bound to worker 2, not 1$"):
        table.acquire("s", 0.0, pinned_worker_id=1)
    with pytest.raises(InvalidArgument, match=r"^session s is bound to rank 1 of worker 2, not 0$"):
        table.acquire("s", 0.0, pinned_worker_id=2, pinned_dp_rank=0)
    assert isinstance(table.acquire("s", 0.0, pinned_worker_id=2, pinned_dp_rank=1), SessionLease)


def test_a_soft_binding_moves_with_its_request() -> None:
    table = Table(mode=AffinityMode.SOFT)
    bound(table, A)
    second = table.acquire("s", 0.0, pinned_worker_id=2)
    assert isinstance(second, SessionLease)
    assert second.bind(B, 3.0, 3) == AffinityRecord("s", 2, 1, 3, 77)
    assert table.bound_rank("s", 3.0) == B


def test_the_bounds() -> None:
    table = Table(max_sessions=2)
    first = bound(table, session_id="1")
    bound(table, session_id="2")
    with pytest.raises(SessionLimitReached, match=r"^session affinity entry limit reached$") as caught:
        table.acquire("3", 0.0)
    assert isinstance(caught.value, Overloaded)
    first.release(0.0)
    assert table.lease("3", now=TTL).rank is None  # the first has expired
    gone = table.lease("2", now=TTL)
    gone.fail()
    bound(table, session_id="4", now=TTL)
    assert gone.bind(A, TTL, 1) is None  # the table is full: the request goes on, without a binding
    assert Table().lease("é" * 128).rank is None
    with pytest.raises(InvalidArgument, match="257 bytes"):
        table.acquire("é" * 128 + "a", 0.0)
    for ttl in (0.5, 31_536_001.0, float("nan")):
        with pytest.raises(ValueError, match="ttl_seconds"):
            Table(ttl)
    assert (Table(5.0).reap_seconds, Table(100.0).reap_seconds) == (5.0, 30.0)


def test_reports_of_other_routers_are_advice() -> None:
    table = Table()
    assert table.advise(AffinityRecord("s", 1, 0, 5, 9), 0.0)
    assert table.bound_rank("s", 5.0) == A
    assert table.lease(now=5.0).release(5.0) == AffinityRecord("s", 1, 0, 5, 9)  # whoever bound it, stays its writer
    assert not table.advise(AffinityRecord("s", 2, 1, 6, 9), 6.0)  # lives, and stays
    assert table.advise(AffinityRecord("s", 1, 0, 5, 9), 14.0)  # the same one: in use elsewhere
    assert table.bound_rank("s", 23.9) == A
    assert table.advise(AffinityRecord("s", 2, 1, 6, 9), 24.0)  # expired, and replaced
    assert table.bound_rank("s", 24.0) == B
    assert not table.advise(AffinityRecord("t", 3, 0, 6, 9), 0.0)  # a rank that is not known here
    assert not table.advise(AffinityRecord("x" * 257, 1, 0, 6, 9), 0.0)
    binding = table.lease("u")
    assert not table.advise(AffinityRecord("u", 1, 0, 6, 9), 0.0)  # is being bound
    assert binding.rank is None
    full = Table(max_sessions=1)
    bound(full)
    assert not full.advise(AffinityRecord("t", 1, 0, 6, 9), 0.0)


@given(st.lists(st.tuples(st.sampled_from(["get", "bind", "fail", "end", "advise"]), st.integers(0, 5)), max_size=60))
@examples(100)
def test_whatever_happens_leases_end_at_nothing(steps: list[tuple[str, int]]) -> None:
    table, leases, now = Table(), list[SessionLease](), 0.0
    for step, number in steps:
        now += number
        session, rank = f"s{number % 2}", (A, B)[number % 2]
        lease = leases[number % len(leases)] if leases else None
        if step == "get":
            found = table.acquire(session, now)
            if isinstance(found, SessionLease):
                leases.append(found)
        elif step == "advise":
            table.advise(AffinityRecord(session, *rank, sequence=1, writer_id=1), now)
        elif lease is not None:
            match step:
                case "bind":
                    lease.bind(lease.rank or rank, now, 1)
                case "fail":
                    lease.fail()
                case _:
                    lease.release(now)
    for each in leases:
        each.release(now)
    table.reap(now + TTL)
    assert len(table) == 0
    assert not table._idle


def test_a_session_that_rested_and_is_in_use_again_does_not_expire() -> None:
    table = Table()
    first = table.lease()
    first.bind(A, 0.0, 1)
    first.release(0.0)
    again = table.lease(now=5.0)
    assert table.reap(5.0 + TTL) == 0
    assert again.rank == table.bound_rank("s", 5.0 + TTL) == A
    again.release(6.0 + TTL)
    assert table.reap(6.0 + 2 * TTL) == 1
    assert not len(table)
