"""Sessions beside a pool: holds, requests that wait for a binding, and what other routers are told."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.errors import Cancelled, Disconnected, InvalidArgument
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.session_affinity import AffinityRecord, SessionLimitReached
from dynamo.router.kv.sessions import PoolSessions, SessionRelay, session_id_of
from dynamo.runtime.calls.context import Context
from support.cases import each_case

A, B = WorkerRank(1), WorkerRank(2, 3)


class House:
    def __init__(self, mode: str = "hard") -> None:
        self.known = {A, B}
        self.told: list[AffinityRecord] = []
        self.sessions = PoolSessions(60, mode, writer_id=9, is_known=self.known.__contains__, report=self.told.append)

    async def bound(self, session: str = "s", rank: WorkerRank = A) -> None:
        hold = await self.sessions.hold(session, Context())
        hold.sent(*rank)
        hold.release()


async def test_the_first_request_binds_and_those_that_come_meanwhile_wait_for_that() -> None:
    house = House()
    first = await house.sessions.hold("s", Context())
    assert first.rank is None
    later = [asyncio.ensure_future(house.sessions.hold("s", Context())) for _ in range(3)]
    while house.sessions.waiting < 3:
        await asyncio.sleep(0)
    first.sent(*B)
    assert [(await each).rank for each in later] == [B, B, B]
    assert (house.sessions.waiting, len(house.told)) == (0, 1)
    assert house.told[0].rank == B


async def test_a_first_request_that_gets_no_worker_lets_the_next_one_bind() -> None:
    house = House()
    first = await house.sessions.hold("s", Context())
    second = asyncio.ensure_future(house.sessions.hold("s", Context()))
    third = asyncio.ensure_future(house.sessions.hold("s", Context()))
    while house.sessions.waiting < 2:
        await asyncio.sleep(0)
    first.release()
    assert (await second).rank is None
    assert not third.done()
    (await second).sent(*A)
    assert (await third).rank == A


async def test_whoever_leaves_while_it_waits_leaves_nothing_behind() -> None:
    house = House()
    first, context = await house.sessions.hold("s", Context()), Context()
    killed = asyncio.ensure_future(house.sessions.hold("s", context))
    cancelled = asyncio.ensure_future(house.sessions.hold("s", Context()))
    while house.sessions.waiting < 2:
        await asyncio.sleep(0)
    context.kill()
    cancelled.cancel()
    with pytest.raises(Cancelled):
        await killed
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert house.sessions.waiting == 0
    first.release()
    assert len(house.sessions.table) == 0


async def test_a_failure_of_its_worker_ends_a_binding_and_that_of_another_or_of_the_client_does_not() -> None:
    house = House()
    await house.bound()
    hold = await house.sessions.hold("s", Context())
    hold.failed(B.worker_id, Disconnected("gone"))
    hold.failed(A.worker_id, InvalidArgument("the client's fault"))
    assert hold.rank == A
    hold.failed(A.worker_id, Disconnected("gone"))
    assert hold.rank is None
    hold.sent(*B)
    hold.release()
    assert house.sessions.bound_rank({"agent_context": {"session_id": "s"}}) == B


@each_case("mode, stays", [("hard", A), ("soft", B)])
async def test_a_detour_moves_a_soft_binding_only(mode: str, stays: WorkerRank) -> None:
    house = House(mode)
    await house.bound()
    hold = await house.sessions.hold("s", Context())
    assert hold.may_go_elsewhere == (mode == "soft")
    hold.go_elsewhere()
    assert hold.rank is None
    hold.sent(*B)
    hold.release()
    assert (await house.sessions.hold("s", Context())).rank == stays


async def test_a_worker_that_is_gone_is_nowhere_to_go_also_for_requests_that_hold_the_session() -> None:
    house = House()
    await house.bound()
    hold = await house.sessions.hold("s", Context())
    house.known.remove(A)
    assert hold.rank is None


async def test_a_request_that_names_another_worker_is_refused_and_a_full_table_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()
    await house.bound()
    with pytest.raises(InvalidArgument, match="session s is bound to worker 1, not 2"):
        await house.sessions.hold("s", Context(), pinned_worker_id=2)
    monkeypatch.setattr(house.sessions.table, "_max_sessions", 1)
    with pytest.raises(SessionLimitReached, match="entry limit reached"):
        await house.sessions.hold("other", Context())


def test_what_a_body_says_of_its_session() -> None:
    assert session_id_of({"agent_context": {"session_id": " s "}}) == "s"
    for body in (
        {},
        {"agent_context": None},
        {"agent_context": {"session_id": 5}},
        {"agent_context": {"session_id": " "}},
    ):
        assert session_id_of(body) is None


async def test_a_relay_passes_bindings_on_to_the_routers_of_the_worker_and_takes_theirs_for_every_pool() -> None:
    relay = SessionRelay({1: "n.c.e"}.get)
    told: list[AffinityRecord] = []

    class Sync:
        report = staticmethod(told.append)

    relay.syncs["n.c.e"] = Sync()  # type: ignore[assignment]
    house, other = House(), House()
    relay.pools["m"], relay.pools["adapter"] = house.sessions, other.sessions
    mine, gone = AffinityRecord("s", 1, 0, 5, 9), AffinityRecord("s", 7, 0, 5, 9)
    relay.report(mine)
    relay.report(gone)
    assert told == [mine]
    now = asyncio.get_running_loop().time()
    assert relay.advise(mine, now)
    assert not relay.advise(gone, now)
    assert len(house.sessions.table) == len(other.sessions.table) == 1
    assert relay.reap(now + 61) == 2
    del other
    assert relay.reap_seconds == 30
