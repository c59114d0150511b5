"""Frontends that divide limits, without processes: their slices over one store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo.access.records import KeyRecord, KeyRing
from dynamo.frontend.access.identity import Identity
from dynamo.frontend.admission.cluster_limits import MEMBERS, ClusterLimits
from dynamo.frontend.admission.limit_table import LimitTable
from dynamo.frontend.admission.quotas import Charge, Quotas, TokenDemand, TokenUse
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from support.access import key
from support.patience import PATIENCE_SECONDS


class OneFrontend:
    """The limits of one frontend, and its requests."""

    def __init__(self, hub: MemoryHub, record: KeyRecord) -> None:
        ring = KeyRing(keys=(record,))
        self.identity = Identity(record)
        self.quotas = Quotas(lambda: ring, LimitTable())
        self.store = MemoryDiscovery(hub)
        self.limits = ClusterLimits(self.quotas, lambda: [self.identity], self.store)

    def begin(self, tokens: int) -> Charge | None:
        charge = self.quotas.open(self.identity)
        try:
            charge.enter("m")
            charge.reserve(TokenDemand(0, tokens))
        except RequestRejected:
            charge.close(TokenUse())
            return None
        return charge


@asynccontextmanager
async def frontends(count: int, record: KeyRecord) -> AsyncIterator[list[OneFrontend]]:
    hub = MemoryHub()
    found = [OneFrontend(hub, record) for _ in range(count)]
    for one in found:
        await one.store.start()
        await one.limits.start()
    try:
        yield found
    finally:
        for one in found:
            await one.limits.aclose()
            await one.store.close()
            one.quotas.table.close()


async def test_places_of_three_frontends_are_never_more_than_the_limit() -> None:
    async with frontends(3, key("k", limits={"concurrent": 7})) as all_of_them:
        running: list[Charge] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(running) < 7:
                charge = all_of_them[0].begin(1) or all_of_them[1].begin(1) or all_of_them[2].begin(1)
                running += [] if charge is None else [charge]
                assert len(running) <= 7
                await asyncio.sleep(0.01)
        assert [one.begin(1) for one in all_of_them] == [None] * 3
        for charge in running:
            charge.close(TokenUse())


async def test_a_budget_of_two_frontends_is_used_to_its_end_and_no_further() -> None:
    async with frontends(2, key("k", budget={"tokens": 1_000, "period": "total"})) as both:
        spent = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while spent < 1_000:
                for one in both:
                    if (charge := one.begin(40)) is not None:
                        charge.close(TokenUse(0, 0, 40))
                        spent += 40
                await asyncio.sleep(0.01)
        assert spent == 1_000


async def test_what_a_frontend_held_is_free_once_it_has_died_and_what_it_spent_is_not() -> None:
    async with frontends(2, key("k", budget={"tokens": 1_000, "period": "total"})) as (dead, alive):
        charge = dead.begin(100)
        assert charge is not None
        charge.close(TokenUse(0, 0, 100))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while alive.quotas.table.elsewhere(alive.quotas.book.of(alive.identity).budgets[0].at) != 100:
                await asyncio.sleep(0.01)
        await dead.limits._work.close()  # as a process that is killed: it says nothing any more
        dead.store.hub.kill(dead.store.lease_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (charge := alive.begin(900)) is None:
                await asyncio.sleep(0.01)
        charge.close(TokenUse(0, 0, 900))
        assert alive.begin(1) is None


async def test_a_store_that_does_not_answer_leaves_each_frontend_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with frontends(2, key("k", limits={"requests_per_minute": 60})) as both:
        for one in both:
            monkeypatch.setattr(one.store, "trouble", lambda: "it is away")
        gates = [one.quotas.book.of(one.identity).requests[0] for one in both]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while any(one.limits._lost_at is None for one in both):
                await asyncio.sleep(0.01)
        granted = [one.quotas.table.granted(gate.at) for one, gate in zip(both, gates, strict=True)]
        assert granted == [30.0, 30.0]


async def test_news_that_are_faster_than_the_answer_to_a_write_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, record = MemoryHub(), key("k", limits={"requests_per_minute": 60})
    quick, slow = OneFrontend(hub, record), OneFrontend(hub, record)
    swap, answered_late = slow.store.swap, 0

    async def swap_slowly(path: str, before: bytes | None, after: bytes) -> bool:
        """Write, and answer once the other frontend has written over it and this one has heard of that."""
        nonlocal answered_late
        is_written, number = await swap(path, before, after), int(path[-2:])
        if is_written and not answered_late:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (pages := slow.limits._seen.pages) is None or pages[number].value in (before, after):
                    await asyncio.sleep(0)
            answered_late += 1
        return is_written

    monkeypatch.setattr(slow.store, "swap", swap_slowly)
    try:
        for one in (quick, slow):
            await one.store.start()
            await one.limits.start()
        assert answered_late == 1
        assert [one.quotas.table.granted(one.quotas.book.of(one.identity).requests[0].at) for one in (quick, slow)] == [
            30.0,
            30.0,
        ]
        assert slow.begin(1) is not None
        (page,) = (slow.limits._seen.pages or {}).values()
        (division,) = page.divisions.values()
        burst = slow.quotas.book.of(slow.identity).requests[0].whole.burst
        assert division.level + sum([one.level for one in division.members.values()]) <= burst + 0.1
    finally:
        for one in (quick, slow):
            await one.limits.aclose()
            await one.store.close()
            one.quotas.table.close()


async def test_frontends_know_each_other_by_a_name_under_their_lease() -> None:
    async with frontends(2, key("k")) as both:
        names = {MEMBERS + one.limits.member for one in both}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while set(await both[0].store.get_prefix(MEMBERS.rstrip("/"))) != names:
                await asyncio.sleep(0.01)
