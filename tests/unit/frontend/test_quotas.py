"""Limits and budgets of keys: exact under any number of requests at once, given back and settled, told apart."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.keys import limit_table, shared_lock
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, Spent, TokenDemand, TokenUse
from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing
from dynamo.protocol.dialect import span_text
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.steady_wall import steady_wall
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange as Answer
from support.frontend_cluster import ScriptedWorker, cluster


class Clock:
    """A clock that the test moves, and the wall's beside it."""

    def __init__(self) -> None:
        self.now, self.wall = 1000.0, 1_800_000_000.0


def quotas_of(*records: KeyRecord, clock: Clock | None = None, table: LimitTable | None = None, **more: Any) -> Quotas:
    ring = msgspec.convert({"keys": msgspec.to_builtins(records), **more}, KeyRing)
    clock = clock or Clock()
    return Quotas(lambda: ring, table or LimitTable(), clock=lambda: clock.now, wall_clock=lambda: clock.wall)


def code_of(work: Callable[[], object]) -> str | None:
    """The code of the refusal, None where there is none."""
    try:
        work()
    except RequestRejected as rejected:
        return rejected.code
    return None


def entered(quotas: Quotas, identity: Identity, model: str = "m") -> Charge | None:
    charge = quotas.open(identity)
    try:
        charge.enter(model)
    except RequestRejected:
        charge.close(TokenUse())
        return None
    return charge


# -- requests ---------------------------------------------------------------------------------------------------------


def test_of_a_thousand_requests_in_a_minute_ten_and_the_burst_pass() -> None:
    clock = Clock()
    record = key("k", limits={"requests_per_minute": 10})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)
    assert sum(entered(quotas, identity) is not None for _ in range(1000)) == 2  # a sixth of it at once
    passed = 0
    for _ in range(1000):
        clock.now += 0.06
        passed += entered(quotas, identity) is not None
    assert passed == 10


def test_a_clock_on_the_wall_that_jumps_changes_no_rate() -> None:
    clock = Clock()
    record = key("k", limits={"requests_per_minute": 1})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)
    assert entered(quotas, identity)
    for jump in (1e6, -2e6):
        clock.wall += jump
        assert entered(quotas, identity) is None
    clock.now += 61
    assert entered(quotas, identity)


def test_a_wall_clock_that_jumps_ahead_and_comes_back_gives_no_budget_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    record = key("k", budget={"tokens": 100, "period": "month"})
    ring = msgspec.convert({"keys": msgspec.to_builtins([record])}, KeyRing)
    quotas, identity = Quotas(lambda: ring, LimitTable()), Identity(record)

    def use() -> str | None:
        charge = quotas.open(identity)
        charge.enter("m")
        found = code_of(lambda: charge.reserve(TokenDemand(60, 40)))
        charge.close(TokenUse() if found else TokenUse(60, 0, 40))
        return found

    assert use() is None
    for jump in (40 * 86_400, -40 * 86_400, 0):
        monkeypatch.setattr(steady_wall, "_wall", lambda jump=jump: time.time() + jump)
        assert use() == "insufficient_quota"


def test_a_refusal_takes_nothing_of_any_limit() -> None:
    record = key("k", project="p", limits={"requests_per_minute": 60}, model_limits={"m*": {"requests_per_day": 1}})
    quotas = quotas_of(record, projects={"p": {"limits": {"concurrent": 5}}})
    identity = Identity(record)
    assert entered(quotas, identity, "m1")
    for _ in range(50):
        assert entered(quotas, identity, "m1") is None  # its day is over, whatever else is left
    for _ in range(4):
        assert entered(quotas, identity, "other")  # and neither minute nor places have been used by the refused
    assert entered(quotas, identity, "other") is None


def test_places_are_given_back_whatever_becomes_of_a_request() -> None:
    record = key("k", limits={"concurrent": 2})
    quotas, identity = quotas_of(record), Identity(record)
    held = [entered(quotas, identity), entered(quotas, identity)]
    assert code_of(lambda: quotas.open(identity).enter("m")) == "concurrency_limit_exceeded"
    for charge in held:
        assert charge is not None
        charge.close(TokenUse())
        charge.close(TokenUse())  # once is enough
    assert entered(quotas, identity)
    assert entered(quotas, identity)
    assert entered(quotas, identity) is None


def test_a_request_that_this_frontend_had_no_place_for_costs_none() -> None:
    record = key("k", limits={"requests_per_minute": 1})
    quotas, identity = quotas_of(record), Identity(record)
    for _ in range(20):
        charge = entered(quotas, identity)
        assert charge is not None
        charge.forgive()
        charge.close(TokenUse())
    assert entered(quotas, identity)
    assert entered(quotas, identity) is None


# -- tokens and budgets -----------------------------------------------------------------------------------------------


def test_tokens_are_reserved_and_what_was_not_used_is_given_back() -> None:
    clock = Clock()
    record = key("k", limits={"tokens_per_minute": 600, "burst": 1.0})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)
    first, second = quotas.open(identity), quotas.open(identity)
    for charge in (first, second):
        charge.enter("m")
    assert first.reserve(TokenDemand(100, 400)) == 400
    assert code_of(lambda: second.reserve(TokenDemand(100, 200))) == "rate_limit_exceeded"
    first.close(TokenUse(100, 0, 50))
    assert second.reserve(TokenDemand(100, 300)) == 300
    second.close(TokenUse())
    third = quotas.open(identity)
    third.enter("m")
    assert third.reserve(TokenDemand(450, 0)) == 0
    assert code_of(lambda: quotas.open(identity).reserve(TokenDemand(1, 0))) == "rate_limit_exceeded"


@pytest.mark.parametrize(("name", "input", "output"), [("input", 100, 0), ("output", 0, 100)])
def test_input_and_output_have_rates_of_their_own(name: str, input: int, output: int) -> None:
    record = key("k", limits={f"{name}_tokens_per_minute": 100, "burst": 1.0})
    quotas, identity = quotas_of(record), Identity(record)
    quotas.open(identity).reserve(TokenDemand(1000 - 10 * input, 1000 - 10 * output))  # of the other one
    quotas.open(identity).reserve(TokenDemand(input, output))
    assert code_of(lambda: quotas.open(identity).reserve(TokenDemand(1, 1))) == "rate_limit_exceeded"


def test_more_than_was_estimated_is_charged_at_the_end() -> None:
    clock = Clock()
    record = key("k", limits={"tokens_per_minute": 6000, "burst": 1.0}, budget={"tokens": 10_000, "period": "day"})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)
    charge = quotas.open(identity)
    charge.enter("m")
    assert charge.reserve(TokenDemand(100, None)) is None
    charge.close(TokenUse(100, 0, 5000))
    assert charge.statuses()[0].remaining == 900
    assert quotas.remaining_ratio(identity) == pytest.approx(0.49)


def test_requests_that_come_together_never_pass_a_budget_and_settle_exactly() -> None:
    chance = random.Random(7)
    record = key("k", budget={"tokens": 20_000, "period": "total"})
    quotas, identity = quotas_of(record), Identity(record)
    running: list[tuple[Charge, int]] = []
    used = refused = 0
    for _ in range(2000):
        if running and chance.random() < 0.5:
            charge, most = running.pop(chance.randrange(len(running)))
            output = chance.randint(0, most)
            charge.close(TokenUse(10, 0, output))
            used += 10 + output
            continue
        charge = quotas.open(identity)
        charge.enter("m")
        most = chance.randint(1, 500)
        if code_of(lambda charge=charge, most=most: charge.reserve(TokenDemand(10, most))) is None:  # type: ignore[misc]
            running.append((charge, most))
        else:
            charge.close(TokenUse())
            refused += 1
        assert used + sum(10 + most for _, most in running) <= 20_000
    for charge, most in running:
        charge.close(TokenUse(10, 0, most))
        used += 10 + most
    assert refused
    assert used <= 20_000
    assert quotas.remaining_ratio(identity) == pytest.approx(1 - used / 20_000)


def test_a_hard_budget_gives_its_rest_and_no_more() -> None:
    record = key("k", budget={"tokens": 1000, "period": "month", "hard": True})
    quotas, identity = quotas_of(record), Identity(record)
    charge = quotas.open(identity)
    charge.enter("m")
    assert charge.reserve(TokenDemand(100, None, most_output=500)) == 500
    other = quotas.open(identity)
    other.enter("m")
    assert other.reserve(TokenDemand(100, 10_000, answers=3)) == 100
    assert code_of(lambda: quotas.open(identity).reserve(TokenDemand(1, None))) == "insufficient_quota"
    charge.close(TokenUse(100, 0, 500))
    other.close(TokenUse(100, 0, 300))
    assert quotas.remaining_ratio(identity) == 0


def test_a_hard_budget_that_a_prompt_alone_would_use_up_leaves_no_answer() -> None:
    record = key("k", budget={"tokens": 100, "period": "month", "hard": True})
    quotas, identity = quotas_of(record), Identity(record)
    assert code_of(lambda: quotas.open(identity).reserve(TokenDemand(100, None))) == "insufficient_quota"
    assert quotas.open(identity).reserve(TokenDemand(99, None)) == 1


def test_money_is_spent_by_the_price_of_the_model() -> None:
    record = key("k", budget={"money": 1.0, "period": "month", "hard": True})
    quotas = quotas_of(record, prices={"dear-*": {"input": 1000.0, "output": 2000.0, "cached": 100.0}})
    identity = Identity(record)
    charge = quotas.open(identity)
    charge.enter("dear-1")
    assert charge.reserve(TokenDemand(500, None)) == 250
    charge.close(TokenUse(500, 400, 100))  # 0.1 + 0.04 + 0.2
    assert quotas.remaining_ratio(identity) == pytest.approx(0.66)
    free = quotas.open(identity)
    free.enter("cheap")
    assert free.reserve(TokenDemand(10**6, None)) is None


def test_a_budget_is_whole_again_in_the_next_period_and_no_clock_that_goes_back_renews_it() -> None:
    clock = Clock()
    record = key("k", budget={"tokens": 100, "period": "day"})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)

    def use() -> str | None:
        charge = quotas.open(identity)
        charge.enter("m")
        found = code_of(lambda: charge.reserve(TokenDemand(60, 40)))
        charge.close(TokenUse() if found else TokenUse(60, 0, 40))
        return found

    assert use() is None
    assert use() == "insufficient_quota"
    clock.wall -= 86_400
    assert use() == "insufficient_quota"
    clock.wall += 2 * 86_400
    assert use() is None
    assert use() == "insufficient_quota"


def test_what_was_spent_before_this_process_began_counts() -> None:
    record, clock = key("k", budget={"tokens": 100, "period": "day"}), Clock()
    ring = KeyRing(keys=(record,))
    identity = Identity(record)
    for period, ratio in ((int(clock.wall // 86_400), 0.3), (int(clock.wall // 86_400) - 1, 1.0)):
        spent = {"key k day tokens": Spent(period, 70)}
        quotas = Quotas(lambda: ring, LimitTable(), spent=spent, wall_clock=lambda: clock.wall)
        assert quotas.remaining_ratio(identity) == pytest.approx(ratio)


def test_a_request_for_more_than_its_key_may_have_is_a_mistake_and_not_to_be_sent_again() -> None:
    record = key("k", max_tokens=50, limits={"max_tokens_per_request": 100})
    quotas, identity = quotas_of(record), Identity(record)
    assert quotas.open(identity).reserve(TokenDemand(50, None)) == 50
    for demand, code in (
        (TokenDemand(1, 51), "max_tokens_exceeded"),
        (TokenDemand(51, 50), "max_tokens_per_request_exceeded"),
    ):
        with pytest.raises(RequestRejected) as refused:
            quotas.open(identity).reserve(demand)
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, "max_tokens")


# -- the table --------------------------------------------------------------------------------------------------------


def test_records_are_found_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LimitTable()
    places = {name: table.record(name, budget=Spent(9, 3)) for name in map(str, range(500))}
    assert len(set(places.values())) == 500
    assert all(table.record(name, value=8.0) == at for name, at in places.items())
    assert {(table.value(at), table.period(at)) for at in places.values()} == {(3.0, 9)}
    table.close()
    table.close()
    monkeypatch.setattr(limit_table, "SLOTS", 8)
    small = LimitTable()

    def fill() -> None:
        for number in range(9):
            small.record(str(number))

    with pytest.raises(InvalidArgument, match="limits"):
        fill()


def small_table(monkeypatch: pytest.MonkeyPatch, **more: int) -> LimitTable:
    for name, value in {"SLOTS": 64, "LONG_SEARCH": 4, "RECLAIM_AFTER": 1}.items():
        monkeypatch.setattr(f"dynamo.frontend.parts.keys.limit_table.{name}", value)
    return LimitTable(**more)


def test_the_places_of_keys_that_are_gone_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(monkeypatch)
    kept = table.record("kept", value=7.0)
    for number in range(1000):  # far more than there are places
        table.release(table.record(f"key {number}", value=1.0))
    assert (table.record("kept"), table.value(kept)) == (kept, 7.0)
    assert table.value(table.record("a new one")) == 0.0


def test_a_table_whose_records_are_all_in_use_refuses_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(monkeypatch)
    places = {table.record(f"key {number}") for number in range(64)}
    assert len(places) == 64
    with pytest.raises(InvalidArgument, match="64 limits are in use"):
        table.record("one more")
    table.hold(min(places), 1.0)
    for at in places:
        table.release(at)
    assert table.record("one more") != min(places)  # a request still holds something of that one


def test_new_keys_are_served_however_many_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(monkeypatch)
    limits = {"requests_per_day": 1, "concurrent": 1}
    rings = [msgspec.convert({"keys": [key(f"key-{n}", limits=limits)]}, KeyRing) for n in range(200)]
    current = rings[0]
    quotas = Quotas(lambda: current, table)
    open_charge: Charge | None = None
    for current in rings:
        charge = quotas.open(Identity(current.keys[0]))
        charge.enter("m")
        if open_charge is None:
            open_charge = charge  # a stream that outlives its key
            continue
        charge.close(TokenUse())
    assert open_charge is not None
    open_charge.close(TokenUse())


def _spend(fd: int, member: int, record: KeyRecord, rounds: int, results: Any) -> None:
    table = LimitTable(4, member=member, fd=os.dup(fd))
    ring = KeyRing(keys=(record,))
    quotas, identity, chance = Quotas(lambda: ring, table), Identity(record), random.Random(member)
    used = entered_ = 0
    for _ in range(rounds):
        charge = quotas.open(identity)
        try:
            charge.enter("m")
            entered_ += 1
            charge.reserve(TokenDemand(5, 20))
        except RequestRejected:
            charge.close(TokenUse())
        else:
            output = chance.randint(0, 20)
            charge.close(TokenUse(5, 0, output))
            used += 5 + output
    results.put((used, entered_))


@pytest.mark.parametrize("has_mutex", [True, False])
def test_processes_of_a_group_share_a_budget_and_a_rate_exactly(
    has_mutex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_mutex:
        monkeypatch.setattr(shared_lock, "_library", lambda: None)
    record = key("k", limits={"requests_per_day": 900, "burst": 1.0}, budget={"tokens": 5000, "period": "total"})
    table = LimitTable.create(4)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    members = [context.Process(target=_spend, args=(table.fd, n, record, 400, results)) for n in range(4)]
    for member in members:
        member.start()
    found = [results.get(timeout=60) for _ in members]
    for member in members:
        member.join()
    ring = KeyRing(keys=(record,))
    quotas = Quotas(lambda: ring, table)
    used = sum(tokens for tokens, _ in found)
    # Never more; and less by what the four may have reserved at once, while the others used up their requests.
    assert 5000 - 4 * 25 <= used <= 5000
    assert quotas.remaining_ratio(Identity(record)) == pytest.approx(1 - used / 5000)
    assert 900 <= sum(entered for _, entered in found) <= 901  # a hundredth of a second brings no further one
    table.close()


def test_places_of_a_process_are_free_with_its_end_and_what_it_reserved_of_a_budget_stays_used() -> None:
    parent = LimitTable.create(2)
    record = key("k", limits={"concurrent": 1}, budget={"tokens": 100, "period": "total"})
    ring, identity = KeyRing(keys=(record,)), Identity(record)
    first, second = [Quotas(lambda: ring, LimitTable(2, member=n, fd=os.dup(parent.fd))) for n in range(2)]
    charge = first.open(identity)
    charge.enter("m")
    charge.reserve(TokenDemand(10, 10))
    charge.close(TokenUse(10, 0, 10))
    charge = first.open(identity)
    charge.enter("m")
    charge.reserve(TokenDemand(50, 30))
    assert entered(second, identity) is None
    assert second.remaining_ratio(identity) == 0
    parent.clear(0)
    last = entered(second, identity)
    assert last is not None
    assert second.remaining_ratio(identity) == 0  # its requests may have made all that they had reserved
    last.close(TokenUse())
    parent.clear(0)
    assert second.remaining_ratio(identity) == 0
    for table in (first.table, second.table, parent):
        table.close()


def test_a_process_that_was_stopped_with_the_lock_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    table = LimitTable.create(1)
    context = multiprocessing.get_context("fork")
    has_it, may_end = context.Event(), context.Event()

    def hold() -> None:
        with table.locked():
            has_it.set()
            may_end.wait(60)

    holder = context.Process(target=hold)
    holder.start()
    assert has_it.wait(60)
    with table.locked():
        assert "for too long" in caplog.text
    may_end.set()
    holder.join()
    table.close()


def test_the_lock_of_a_process_that_was_killed_with_it_is_free_at_once(caplog: pytest.LogCaptureFixture) -> None:
    table = LimitTable.create(2)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        has_it = context.Event()

        def hold(has_it: Any = has_it) -> None:
            with table.locked():
                has_it.set()
                signal.pause()

        holder = context.Process(target=hold)
        holder.start()
        assert has_it.wait(60)
        holder.kill()
        holder.join()
        other = LimitTable(2, member=1, fd=os.dup(table.fd))
        for each in (other, table, other):
            assert each.lock()
            each.unlock(True)
        other.close()
    assert not caplog.records
    table.close()


# -- through the frontend ---------------------------------------------------------------------------------------------


class Obedient:
    """A worker that makes as many tokens as it may, and reports what it made."""

    def __init__(self) -> None:
        self.made = 0
        self.gate: asyncio.Event | None = None

    async def script(self, body: Any, context: Any, sink: Any) -> None:
        most = body["stop_conditions"]["max_tokens"] or 7
        if self.gate is not None:
            await self.gate.wait()
        for number in range(most):
            if context.is_stopped() or context.is_killed():
                return
            self.made += 1
            sink.send_tokens([97], finish_reason="length" if number == most - 1 else None)
            if number % 16 == 0:
                await asyncio.sleep(0)


async def worker_of(found: Any) -> tuple[ScriptedWorker, Obedient]:
    obedient = Obedient()
    return await found.worker(obedient.script), obedient


def error_of(answer: Answer) -> tuple[int | None, str]:
    return answer.status, answer.json["error"]["code"]


async def test_64_streams_at_once_never_overspend_a_budget_and_it_is_settled_exactly(tmp_path: Path) -> None:
    for id, is_hard, asked in (("soft", False, 40), ("hard", True, 40), ("open", True, None)):
        record = key(id, budget={"tokens": 1000, "period": "month", "hard": is_hard})
        async with closed_cluster(tmp_path, record) as found:
            _, worker = await worker_of(found)
            worker.gate = asyncio.Event()
            fields: dict[str, Any] = {} if asked is None else {"max_tokens": asked}
            streams = [
                found.client.begin_chat(
                    stream=True, stream_options={"include_usage": True}, headers=bearer(record.id), **fields
                )
                for _ in range(64)
            ]
            await asyncio.sleep(0.05)
            worker.gate.set()
            answers = [await stream.done() for stream in streams]
            good = [answer for answer in answers if answer.status == 200]
            used = sum(answer.chunks[-1]["usage"]["total_tokens"] for answer in good)
            assert good
            assert len(good) < 64
            assert used <= 1000
            assert {error_of(answer) for answer in answers if answer not in good} == {(429, "insufficient_quota")}
            assert all(answer.headers["x-should-retry"] == "false" for answer in answers if answer.status == 429)
            quotas, keys = found.frontend.parts["keys"].quotas, found.frontend.parts["keys"].store
            assert quotas is not None
            assert keys is not None
            identity = keys.identity(record.id)
            assert identity is not None
            assert quotas.remaining_ratio(identity) == pytest.approx(1 - used / 1000)
            if is_hard:
                reasons = [[reason for reason in answer.finish_reasons() if reason] for answer in good]
                assert reasons == [["length"]] * len(good)
                assert used == 1000


async def test_a_thousand_requests_at_once_on_a_key_of_ten_a_minute(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("k", limits={"requests_per_minute": 10, "burst": 1.0})) as found:
        worker, _ = await worker_of(found)
        exchanges = [found.client.begin_chat(max_tokens=1, headers=bearer("k")) for _ in range(1000)]
        answers = [await exchange.done(60) for exchange in exchanges]
        passed = sum(answer.status == 200 for answer in answers)
        assert 10 <= passed <= 11  # the machine may take the six seconds in which an eleventh becomes free
        assert len(worker.requests) == passed
        refused = [answer for answer in answers if answer.status != 200]
        assert {error_of(answer) for answer in refused} == {(429, "rate_limit_exceeded")}
        for answer in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 7
            assert 1 <= int(answer.headers["retry-after-ms"]) <= 7000
            assert "requests_per_minute of key k is 10" in answer.json["error"]["message"]


async def test_answers_say_how_far_the_limits_are_used(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 6000, "burst": 0.5}
    async with closed_cluster(tmp_path, key("k", limits=limits), key("free")) as found:
        await worker_of(found)
        plain = await found.client.chat(max_tokens=3, headers=bearer("k"))
        assert plain.headers["x-ratelimit-limit-requests"] == "60"
        assert plain.headers["x-ratelimit-remaining-requests"] == "29"
        assert plain.headers["x-ratelimit-limit-tokens"] == "6000"
        assert 2900 < int(plain.headers["x-ratelimit-remaining-tokens"]) < 3000
        assert plain.headers["x-ratelimit-reset-requests"].endswith("s")
        stream = await found.client.chat(max_tokens=3, stream=True, headers=bearer("k"))
        assert stream.headers["x-ratelimit-remaining-requests"] == "28"
        wrong = await found.client.chat(max_tokens=-1, headers=bearer("k"))
        assert (wrong.status, wrong.headers["x-ratelimit-remaining-requests"]) == (400, "27")
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        messages = await found.client.call("POST", "/v1/messages", body, headers=bearer("k"))
        assert messages.headers["anthropic-ratelimit-requests-limit"] == "60"
        assert messages.headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
        free = await found.client.chat(headers=bearer("free"))
        assert not [name for name in free.headers if "ratelimit" in name]


async def test_what_is_refused_counts_and_is_not_read_when_the_rate_is_used_up(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 6, "burst": 0.5}
    async with closed_cluster(tmp_path, key("k", limits=limits)) as found:
        worker, _ = await worker_of(found)
        raw = {"content-type": "application/json"} | bearer("k")
        wrong = (
            found.client.chat(temperature=99, headers=bearer("k")),
            found.client.chat(model="nowhere", headers=bearer("k")),
            found.client.call("POST", "/v1/chat/completions", b"{", headers=raw | {"content-type": "text/html"}),
        )
        assert [(await each).status for each in wrong] == [400, 404, 415]
        broken = await found.client.call("POST", "/v1/chat/completions", b"{", headers=raw)
        assert error_of(broken) == (429, "rate_limit_exceeded")
        assert error_of(await found.client.chat(headers=bearer("k"))) == (429, "rate_limit_exceeded")
        assert worker.requests == []


def test_many_refusals_at_once_owe_no_more_than_the_burst() -> None:
    clock = Clock()
    record = key("k", limits={"requests_per_minute": 60, "burst": 0.5})
    quotas, identity = quotas_of(record, clock=clock), Identity(record)
    for _ in range(10_000):
        quotas.count_refused(identity)
    assert code_of(quotas.open(identity).check_requests) == "rate_limit_exceeded"
    clock.now += 1
    assert entered(quotas, identity) is not None


async def test_anthropics_shape_of_a_refusal(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("k", limits={"requests_per_minute": 1})) as found:
        await worker_of(found)
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        answers = [await found.client.call("POST", "/v1/messages", body, headers=bearer("k")) for _ in range(2)]
        assert answers[0].status == 200
        assert (answers[1].status, answers[1].json["error"]["type"]) == (429, "rate_limit_error")


async def test_an_overload_is_told_apart_and_costs_the_key_nothing(tmp_path: Path) -> None:
    record = key("k", limits={"requests_per_minute": 2, "burst": 1.0})
    async with closed_cluster(tmp_path, record, key("free"), max_requests_in_flight=1) as found:
        worker, _ = await worker_of(found)
        worker.script = worker.hold
        held = found.client.begin_chat(headers=bearer("free"))
        await worker.started.wait()
        for _ in range(5):
            assert (await found.client.chat(headers=bearer("k"))).status == 529
        held.disconnect()
        await held.done()
        worker.script = Obedient().script
        statuses = [(await found.client.chat(headers=bearer("k"))).status for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_a_cancelled_stream_is_charged_for_what_was_made(tmp_path: Path) -> None:
    record = key("k", limits={"concurrent": 1}, budget={"tokens": 10_000, "period": "total"})
    async with closed_cluster(tmp_path, record) as found:
        worker = await found.worker()

        async def script(body: Any, context: Any, sink: Any) -> None:
            sink.send_tokens([97] * 5)
            await context.async_killed_or_stopped()

        worker.script = script
        stream = found.client.begin_chat("x", stream=True, max_tokens=5000, headers=bearer("k"))
        await stream.until(lambda seen: b"aaaaa" in seen.body)
        assert error_of(await found.client.chat(headers=bearer("k"))) == (429, "concurrency_limit_exceeded")
        stream.disconnect()
        await stream.done()
        quotas, keys = found.frontend.parts["keys"].quotas, found.frontend.parts["keys"].store
        assert quotas is not None
        assert keys is not None
        identity = keys.identity("k")
        assert identity is not None
        prompt = len(worker.requests[0]["token_ids"])
        assert quotas.remaining_ratio(identity) == pytest.approx(1 - (prompt + 5) / 10_000)
        worker.script = Obedient().script
        assert (await found.client.chat(max_tokens=2, headers=bearer("k"))).status == 200


async def test_the_output_of_a_key_is_held_to_what_it_may_have(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("k", max_tokens=5)) as found:
        worker, _ = await worker_of(found)
        answer = await found.client.chat(headers=bearer("k"))
        assert answer.json["usage"]["completion_tokens"] == 5
        assert worker.requests[-1]["stop_conditions"]["max_tokens"] == 5
        assert error_of(await found.client.chat(max_tokens=6, headers=bearer("k"))) == (400, "max_tokens_exceeded")
        assert len(worker.requests) == 1


async def test_without_keys_nothing_is_charged(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        assert "keys" not in found.frontend.parts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0121, "13ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (7200, "2h0m0s"),
        (7261, "2h1m1s"),
    ],
)
def test_lengths_of_time_look_as_openai_writes_them(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
