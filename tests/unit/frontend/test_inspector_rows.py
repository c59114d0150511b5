"""Rows of streams are made once and made anew from what has changed, and patches hold no more than that."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.inspect.store import patched
from dynamo.errors import CannotConnect, DynamoException
from dynamo.frontend.base.access import KeyRole
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.requests import RequestSeries
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.pictures import MemberPicture, PictureQuery, entries_of, merge, patch_between
from dynamo.frontend.parts.inspector.recent import RecentRequests
from dynamo.frontend.parts.inspector.routing import KEPT_DECISIONS, KEPT_UNSEEN, RoutingLog
from dynamo.frontend.parts.inspector.stream_rows import STALLED_SECONDS
from dynamo.frontend.parts.inspector.streams import StreamTable
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.frontend.parts.inspector.watching import CpuMeter, Watching, period_of
from dynamo.frontend.pipeline.exchange import Arrival, Exchange, ExchangeRegister, Phase
from dynamo.frontend.pipeline.outcome import Outcome, Reached
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.placement import Candidate, Placement
from dynamo.protocol.inspector.filters import parse_filter
from dynamo.protocol.inspector.views import EventView, FrontendView, Patch, Picture, StreamView, WorkerView
from dynamo.protocol.worker_request import PlannedRequest
from dynamo.router.workers.worker_holds import WorkerHolds
from dynamo.runtime.calls.request_plane.base import Instance
from dynamo.runtime.observe.metrics.registry import MetricsRegistry
from dynamo.testing.simulation.loop import run_virtual
from support.frontend_cluster import Cluster, cluster, fail, say
from support.inspecting import Lens, Patches
from support.properties import examples

SERIES = RequestSeries(FrontendFamilies(MetricsRegistry(), "dynamo_frontend", {}))


class Choice:
    """The stream of one choice, as a row needs it."""

    def __init__(self, instance_id: int | None = 0xA) -> None:
        self.tokens, self.attempts, self.is_reading = 0, 1, True
        self.instance_id = instance_id

    def fail_over(self, error: DynamoException) -> bool:
        raise NotImplementedError


class House:
    """A register, its table, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.register = ExchangeRegister()
        clock = InspectorClock(wall_clock=lambda: 1000.0)
        clock.loop_time = lambda: self.now
        self.table = StreamTable(self.register, clock, "host:1")

    def request(self, *choices: Choice, name: str = "r") -> Exchange:
        """A request that was handed to its worker."""
        exchange = Exchange(name, Arrival(b"", self.now, path="/v1/chat/completions"), StageTimer(is_wanted=False))
        exchange.counters = SERIES.begin("m", "chat_completions", "stream", self.now)
        exchange.work = WorkRequest(Plan(PlannedRequest(), [[1, 2, 3]]), exchange.timer)
        exchange.work.running = choices  # type: ignore[assignment]
        exchange.enter(Phase.DISPATCHED, self.now)
        self.register.add(exchange)
        return exchange

    def token(self, exchange: Exchange, count: int = 1) -> None:
        assert exchange.counters is not None
        assert exchange.work is not None
        exchange.enter(Phase.STREAMING, self.now)
        exchange.counters.tokens(count, self.now)
        exchange.work.running[0].tokens += count  # type: ignore[misc]

    def look(self, seconds: float = 1.0) -> StreamView:
        """The only row, so much later."""
        self.now += seconds
        self.table.look()
        ((row,), count) = self.table.rows(parse_filter(""), "age", 9)
        assert count == len(self.register)
        return row


@pytest.fixture
def house() -> House:
    return House()


async def test_a_row_without_news_is_the_same_object(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    rows = [house.look() for _ in range(4)]
    assert rows[1].tokens_per_second == 0.0  # the first look gives the mean since the first token
    assert rows[1] is rows[2] is rows[3]


async def test_every_token_and_rate_is_shown_at_the_next_look(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    house.look()
    for count in (0, 3, 0, 0, 1, 2, 0, 7):
        house.token(exchange, count) if count else None
        row = house.look()
        assert (row.output_tokens, row.tokens_per_second) == (exchange.work.running[0].tokens, float(count))  # type: ignore[union-attr]


async def test_tokens_after_a_silence_are_not_spread_over_it(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    for _ in range(30):
        house.look()
    house.now += 0.9
    house.token(exchange, 5)
    assert house.look(0.1).tokens_per_second == 5.0


async def test_a_token_seen_by_a_look_too_soon_for_a_rate_counts_in_the_next_one(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    house.look(), house.look()
    house.token(exchange, 4)
    early = house.look(0.2)
    assert (early.output_tokens, early.tokens_per_second) == (5, 0.0)
    assert house.look(0.8).tokens_per_second == 4.0
    assert house.look().tokens_per_second == 0.0


async def test_a_silence_makes_a_row_stalled_though_nothing_else_has_changed(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    rows = [house.look() for _ in range(8)]
    assert [row.is_stalled for row in rows] == [number + 1 >= STALLED_SECONDS for number in range(8)]
    house.token(exchange)
    assert not house.look().is_stalled


async def test_a_client_that_falls_behind_and_catches_up_is_seen_without_a_token(house: House) -> None:
    choice = Choice()
    exchange = house.request(choice)
    house.token(exchange)
    entered = house.look().phase_ms
    house.look()
    choice.is_reading = False
    slow = house.look()
    assert (slow.phase, slow.phase_ms) == ("client slow", slow.last_token_ms)
    choice.is_reading = True
    assert (house.look().phase, house.look().phase_ms) == ("decode", entered)


async def test_a_request_shows_every_phase_on_its_way(house: House) -> None:
    choice = Choice(None)
    choice.attempts = 0
    exchange = house.request()
    exchange.phase = Phase.RECEIVED
    phases = [house.look().phase]
    for phase in (Phase.ADMITTED, Phase.PREPROCESSED):
        exchange.enter(phase, house.now)
        phases.append(house.look().phase)
    exchange.work.running = (choice,)  # type: ignore[union-attr]
    phases.append(house.look().phase)
    choice.instance_id, choice.attempts = 0xA, 1
    exchange.enter(Phase.DISPATCHED, house.now)
    phases.append(house.look().phase)
    house.token(exchange)
    row = house.look()
    assert [*phases, row.phase] == ["admitted", "preprocess", "route", "queued", "prefill", "decode"]
    assert (row.ttft_seconds is not None, row.workers, row.attempt) == (True, ["a"], 1)
    exchange.end()
    assert house.look().phase == "sending"


async def test_a_stream_that_moves_to_another_worker_shows_both(house: House) -> None:
    choice = Choice()
    exchange = house.request(choice)
    assert exchange.work is not None
    tally = exchange.work.tally
    tally.instances.append(instance(0xA))
    house.token(exchange)
    house.look(), house.look()
    candidate = Candidate(0xA)
    tally.note_failure("generate", Placement(candidate, "round-robin", ()), CannotConnect("gone"), house.now)
    choice.instance_id = None
    assert house.look().workers == ["a"]
    choice.instance_id, choice.attempts = 0xB, 2
    row = house.look()
    assert (row.workers, row.attempt) == (["a", "b"], 2)
    tally.instances.append(instance(0xB))
    house.token(exchange)
    row = house.look()
    assert (row.workers, row.output_tokens) == (["a", "b"], 2)
    assert list(house.table.pulses()) == ["b"]


async def test_choices_of_one_request_are_added_up(house: House) -> None:
    choices = [Choice(), Choice(0xB)]
    exchange = house.request(*choices)
    house.token(exchange)
    house.look(), house.look()
    choices[1].tokens = 4
    house.token(exchange)
    assert house.look().output_tokens == 6
    house.look(), house.look()
    late = Choice()
    late.tokens = 7
    exchange.work.running = (*choices, late)  # type: ignore[union-attr]
    assert house.look().output_tokens == 13


async def test_a_request_that_has_ended_is_let_go_of(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    house.look()
    known = weakref.ref(exchange.work.running[0])  # type: ignore[union-attr]
    house.register.remove(exchange)
    house.table.forget(exchange)
    del exchange
    gc.collect()
    assert known() is None
    house.table.look()
    assert house.table.rows(parse_filter(""), "age", 9) == ([], 0)


def instance(id: int) -> Instance:
    return Instance(namespace="ns", component="c", endpoint="generate", instance_id=id, transport={})


# -- patches -----------------------------------------------------------------------------------------------------------

rows = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        StreamView,
        id=st.just(""),
        frontend=st.just("fe"),
        endpoint=st.just("chat"),
        phase=st.sampled_from(["prefill", "decode"]),
        started_ms=st.just(1),
        phase_ms=st.just(2),
        output_tokens=st.integers(0, 2),
        tokens_per_second=st.none() | st.just(1.5),
        last_token_ms=st.none() | st.integers(0, 2),
        workers=st.sampled_from([["a"], ["a", "b"]]),
        is_stalled=st.booleans(),
    ),
)


@examples(300)
@given(rows, rows)
def test_a_patch_leads_from_one_picture_to_the_next(one: dict[str, StreamView], other: dict[str, StreamView]) -> None:
    before, after = (
        Picture(seq=seq, taken_ms=seq, streams=[msgspec.structs.replace(row, id=id) for id, row in found.items()])
        for seq, found in ((1, one), (2, other))
    )
    patch = patch_between(entries_of(before), entries_of(after), after)
    read = patched(before, msgspec.json.decode(msgspec.json.encode(patch), type=Patch))
    assert {row.id: row for row in read.streams or ()} == {row.id: row for row in after.streams or ()}
    assert not patch.progress.keys() & {key.removeprefix("streams/") for key in patch.set}
    kept = {row.id for row in before.streams or ()} & {row.id for row in after.streams or ()}
    assert patch.progress.keys() <= kept


async def watched(house: Cluster) -> Patches:
    watch = Lens(house).watch(views="streams")
    await watch.until(lambda each: len(each.events) == 1)
    return Patches(watch)


def has_answered(patch: Any) -> bool:
    return any(row["output_tokens"] for row in patch["set"].values())


async def test_tokens_are_sent_as_progress_and_the_end_of_a_stream_as_its_key(tmp_path: Path) -> None:
    go: asyncio.Queue[str | None] = asyncio.Queue()

    async def script(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([97])
        while (finish := await go.get()) is None:
            sink.send_tokens([97, 97])
        sink.send_tokens([97], finish_reason=finish)

    async with cluster(tmp_path) as house:
        await house.worker(script)
        patches = await watched(house)
        request = house.client.begin_chat(stream=True)
        await request.until(lambda each: each.body.count(b'"content"') >= 1)
        (key,) = (await patches.until(has_answered))["set"]
        go.put_nowait(None)
        patch = await patches.until(
            lambda each: each["set"] or [p["output_tokens"] for p in each["progress"].values()] > [1]
        )
        assert patch["set"] == {}
        progress = patch["progress"][key.removeprefix("streams/")]
        assert progress["output_tokens"] == 3
        assert progress.keys() == {"output_tokens", "tokens_per_second", "last_token_ms"}
        go.put_nowait("stop")
        await request.done()
        patch = await patches.until(lambda each: each["del"])
        assert (patch["del"], patch["progress"], patch["set"]) == ([key], {}, {})


async def test_a_stream_that_moved_is_sent_whole_with_its_new_worker(tmp_path: Path) -> None:
    lose, go = asyncio.Event(), asyncio.Event()

    async def first(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([97])
        await lose.wait()
        await fail(CannotConnect("gone"))(body, context, sink)

    async def second(body: Any, context: Any, sink: Any) -> None:
        sink.send_tokens([97])
        await go.wait()
        await say("x")(body, context, sink)

    async with cluster(tmp_path, router_mode="round-robin") as house:
        workers = [await house.worker(), await house.worker()]
        for worker in workers:
            worker.script = first
        patches = await watched(house)
        request = house.client.begin_chat(stream=True)
        await request.until(lambda each: each.body.count(b'"content"') >= 1)
        (key,) = (patch := await patches.until(has_answered))["set"]
        (old,) = patch["set"][key]["workers"]
        for worker in workers:
            worker.script = second
        lose.set()
        patch = await patches.until(lambda each: key in each["set"] and len(each["set"][key]["workers"]) == 2)
        row = patch["set"][key]
        assert (row["workers"][0], row["attempt"]) == (old, 2)
        go.set()
        await request.done()


def test_a_viewer_whose_pictures_are_dear_gets_them_less_often() -> None:
    assert [period_of(costs) for costs in ((), (0.004,), (0.004, 9.0), (0.01, 0.008), (9.0, 9.0))] == [1, 1, 1, 1.6, 5]
    used = itertools.count(0.0, 0.01)  # each look at the clock of the processor shows 10 ms more
    meter = CpuMeter(lambda: next(used))

    async def take(query: PictureQuery, visitor: Visitor, seq: int) -> Picture:
        with meter.running():
            return Picture(seq=seq, taken_ms=seq, events=[EventView(id=str(seq), at_ms=seq, kind="", text="")])

    async def main() -> list[int]:
        viewer = Watching(take, meter).open(PictureQuery(("events",)), Visitor(KeyRole.ADMIN, None), None)
        times = []
        for _ in range(4):
            assert await viewer.next()
            times.append(asyncio.get_running_loop().time())
        return [round(after - before) for before, after in itertools.pairwise(times)]

    assert run_virtual(main()) == [1, 4, 4]


# -- routing decisions -------------------------------------------------------------------------------------------------


async def test_a_decision_is_made_into_a_row_once_and_again_when_its_request_is_known() -> None:
    holds = WorkerHolds()
    log = RoutingLog(holds, InspectorClock(), "host:1")
    log.looked()
    placements = [Placement(Candidate(0xA), "round-robin", ()) for _ in range(KEPT_DECISIONS + 5)]
    for placement in placements:
        assert holds.on_choice is not None
        holds.on_choice("m", (placement.candidate,), placement)
    before = log.rows(9)
    assert log.rows(9) == before
    assert all(one is other for one, other in zip(log.rows(9), before, strict=True))
    tally = Plan(PlannedRequest(), [[1]]).tally()
    tally.placement = placements[-2]
    log.name("r", tally)
    after = log.rows(9)
    assert [row.request_id for row in after] == [None, "r", *[None] * 7]
    assert [one is other for one, other in zip(after, before, strict=True)] == [True, False, *[True] * 7]
    tally.placement = placements[0]  # which is kept no longer
    log.name("old", tally)
    assert (len(log), "old" in [row.request_id for row in log.rows(KEPT_DECISIONS)]) == (KEPT_DECISIONS, False)


def test_the_last_decisions_are_kept_without_a_viewer() -> None:
    holds = WorkerHolds()
    clock = InspectorClock(wall_clock=lambda: 1000.0)
    clock.loop_time = lambda: 5.0
    log = RoutingLog(holds, clock, "host:1")
    for number in range(KEPT_UNSEEN + 5):
        assert holds.on_choice is None  # the way of a request does not lead through the log
        tally = Plan(PlannedRequest(), [[1]]).tally()
        tally.placement = Placement(Candidate(number), "round-robin", ())
        log.ended(f"r{number}", "m", tally, 5.0)
    assert [row.request_id for row in log.rows(99)] == [f"r{number}" for number in range(KEPT_UNSEEN + 4, 4, -1)]
    assert [each.is_chosen for row in log.rows(1) for each in row.candidates] == [True]


def test_requests_above_a_worker_s_limit_are_queued() -> None:
    frontend = FrontendView(id="host:1", host="host", pid=1, started_ms=0, stage="serving", in_flight=0)

    def rows(*members: tuple[int, int | None]) -> list[tuple[int, int | None]]:
        pictures = [
            MemberPicture(frontend=frontend, workers=[WorkerView(id="a", role="agg", models=[], address="", wire="mux",
                state="ready", running=running, limit=limit)])
            for running, limit in members
        ]  # fmt: skip
        (worker,) = merge(pictures, PictureQuery(limit=9), lambda row: row.id, reverse=False)[0].workers
        return [(worker.running, worker.queued)]

    assert rows((71, 64)) == [(64, 7)]
    assert rows((40, 64), (31, 64)) == [(64, 7)]  # two frontends
    assert rows((3, 64)) == [(3, 0)]
    assert rows((71, None)) == [(71, None)]


async def test_a_row_of_an_ended_request_is_made_once(house: House) -> None:
    exchange = house.request(Choice())
    house.token(exchange)
    exchange.end()
    recent = RecentRequests(InspectorClock(), "host:1")
    assert recent.add(exchange, Outcome("chat_completions", house.now, Reached.ADMITTED)).view is None
    (row,), _ = recent.rows(parse_filter(""), 9)
    assert recent.rows(parse_filter(""), 9)[0][0] is row
    assert (row.endpoint, row.outcome, row.ttft_seconds) == ("chat_completions", "ok", 0.0)
