"""Frontends that divide limits, without processes: their slices over one store in memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from dynamo.frontend.parts.keys.cluster_limits import EVERY_NAMESPACE, ClusterLimits
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.part import _scope_of
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, TokenDemand, TokenUse
from dynamo.frontend.parts.keys.rules.division import Division, Holding
from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing
from dynamo.frontend.parts.keys.slices import Slice
from dynamo.frontend.settings import FrontendSettings
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from support.access import key
from support.fails_once import BrokenSteps
from support.patience import PATIENCE_SECONDS


class OneFrontend:
    """The limits of one frontend, and its requests."""

    def __init__(self, hub: MemoryHub, record: KeyRecord, scope: str = EVERY_NAMESPACE) -> None:
        ring = KeyRing(keys=(record,))
        self.identity = Identity(record)
        self.quotas = Quotas(lambda: ring, LimitTable())
        self.store = MemoryDiscovery(hub)
        self.limits = ClusterLimits(self.quotas, lambda: [self.identity], self.store, scope=scope)

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
async def frontends(count: int, record: KeyRecord, *scopes: str) -> AsyncIterator[list[OneFrontend]]:
    hub = MemoryHub()
    found = [OneFrontend(hub, record, scope) for scope in scopes or [EVERY_NAMESPACE] * count]
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


@pytest.mark.parametrize("step", ["ClusterLimits._tick", "_Seen.apply"])
async def test_limits_are_divided_also_after_a_fault_in_each_of_the_loops(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = BrokenSteps(monkeypatch, f"dynamo.frontend.parts.keys.cluster_limits:{step}")
    async with frontends(2, key("k", limits={"concurrent": 2})) as (one, other):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (running := one.begin(1)) is None:
                await asyncio.sleep(0.01)
            while (beside := other.begin(1)) is None:
                await asyncio.sleep(0.01)
        assert [each.begin(1) for each in (one, other)] == [None, None]
        assert steps.counted == 1
        running.close(TokenUse())
        beside.close(TokenUse())


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


def spend(quotas: Quotas, identity: Identity, tokens: int) -> None:
    charge = quotas.open(identity)
    charge.reserve(TokenDemand(0, tokens))
    charge.close(TokenUse(0, 0, tokens))


def reported(quotas: Quotas, one: Slice, before: Division | None) -> Division:
    """What a frontend writes in its turn."""
    turn = one.look(before, "me", {"me", "other"}, 1.0)
    assert turn is not None
    one.take()
    return turn.division


def test_what_a_process_of_a_group_has_spent_and_not_reported_is_reported_by_the_next_one_that_leads() -> None:
    record, parent = key("k", budget={"tokens": 1_000, "period": "total"}), LimitTable.create(2)
    ring, identity = KeyRing(keys=(record,)), Identity(record)
    first, second = [Quotas(lambda: ring, LimitTable(2, member=n, fd=os.dup(parent.fd))) for n in range(2)]
    slices = [Slice(quotas.book.of(identity).budgets[0], quotas, 0.0) for quotas in (first, second)]
    spend(first, identity, 100)
    division = reported(first, slices[0], Division(members={"other": Holding(1.0, spent=7.0)}))
    assert division.spent_beside("other") == 0  # of before it was there: the file of the usage is every frontend's
    spend(first, identity, 30)
    spend(second, identity, 5)
    division = reported(second, slices[1], division)
    assert division.spent_beside("other") == 35
    # After its lease ended the record of the group is gone, and what it reported is in the sum of those that are gone.
    spend(second, identity, 4)
    without = Division(spent=35.0, members={"other": Holding(1.0, spent=7.0)})
    assert reported(second, slices[1], without).spent_beside("other") == 39
    for table in (first.table, second.table, parent):
        table.close()


def test_what_is_spent_in_a_new_period_before_a_turn_is_reported() -> None:
    record, wall = key("k", budget={"tokens": 1_000, "period": "day"}), [86_400.0 * 20_000]
    ring, identity = KeyRing(keys=(record,)), Identity(record)
    quotas = Quotas(lambda: ring, LimitTable(), wall_clock=lambda: wall[0])
    one = Slice(quotas.book.of(identity).budgets[0], quotas, 0.0)
    division = reported(quotas, one, None)
    spend(quotas, identity, 100)
    assert reported(quotas, one, division).spent_beside("other") == 100
    wall[0] += 86_400
    spend(quotas, identity, 60)
    today = Division(period=20_001, members={"other": Holding(400.0, spent=7.0)})
    assert reported(quotas, one, today).spent_beside("other") == 60


async def test_the_record_of_a_key_that_no_frontend_has_keeps_what_was_spent_and_goes_after_forty_days() -> None:
    record = key("k", budget={"tokens": 1_000, "period": "total"})
    async with frontends(2, record) as both:
        one = both[0]
        identities = [other.identity for other in both]

        async def record_is(holds: Callable[[dict[str, Division]], bool]) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    pages = await one.store.get_prefix("v1/limits/*/pages")
                    (page,) = [msgspec.json.decode(value, type=dict[str, Division]) for value in pages.values()]
                    if holds(page):
                        return
                    one.limits._seen.touch()
                    one.limits._seen.has_news.set()
                    await asyncio.sleep(0.01)

        spend(one.quotas, one.identity, 100)
        await record_is(lambda page: page["key k total tokens budget"].spent_beside("") == 100)
        for other in both:
            other.limits._slices._identities = list  # its key file has no key any more
        await record_is(lambda page: bool(page) and page["key k total tokens budget"].unused_since > 0)
        await record_is(lambda page: page["key k total tokens budget"].spent == 100)
        for other, identity in zip(both, identities, strict=True):
            other.limits._slices._identities = [identity].copy
        await record_is(lambda page: not page["key k total tokens budget"].unused_since)
        await record_is(lambda page: len(page["key k total tokens budget"].members) == 2)
        await record_is(lambda page: page["key k total tokens budget"].spent == 100)
        assert both[1].begin(901) is None
        for other in both:
            other.limits._slices._identities = list
        await record_is(lambda page: page["key k total tokens budget"].unused_since > 0)
        one.quotas.wall_clock = lambda: time.time() + 41 * 86_400
        await record_is(lambda page: not page)


async def test_frontends_know_each_other_by_a_name_under_their_lease() -> None:
    async with frontends(2, key("k")) as both:
        names = {one.limits.member_key for one in both}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while set(await both[0].store.get_prefix("v1/limits/*/members")) != names:
                await asyncio.sleep(0.01)


async def test_frontends_of_other_namespaces_have_limits_of_their_own() -> None:
    record = key("k", limits={"concurrent": 4}, budget={"tokens": 1_000, "period": "total"})
    async with frontends(3, record, "one", "two", "two") as (one, *others):
        running: list[Charge] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(running) < 4:
                charge = others[0].begin(1) or others[1].begin(1)
                running += [] if charge is None else [charge]
                await asyncio.sleep(0.01)
        assert [other.begin(1) for other in others] == [None, None]
        all_of_it = one.begin(800), one.begin(1), one.begin(1), one.begin(1)
        assert None not in all_of_it
        for charge in (*running, *filter(None, all_of_it)):
            charge.close(TokenUse())


def test_which_frontends_divide_limits_follows_from_the_namespaces_that_they_serve() -> None:
    scopes = [
        _scope_of(FrontendSettings(namespace=namespace, namespace_prefix=prefix))
        for namespace, prefix in ((None, None), ("a", None), ("a/b", None), ("a", "a"), (None, "a"))
    ]
    assert scopes == ["*", "a", "a%2Fb", "a*", "a*"]
