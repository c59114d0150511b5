"""Replays in virtual time: the exact cases of the mock engine, what every replay promises, losses and restarts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.kv.events import RouterEvent
from dynamo.replay.figures import ReplayFigures, summary_of
from dynamo.replay.flight import Flight
from dynamo.replay.frontends import Routed
from dynamo.replay.generated import TraceShape, generate
from dynamo.replay.modes import COUNTING_MODES, frontend_of
from dynamo.replay.run import pooled_hit_rate, run_replay
from dynamo.replay.setup import ReplaySetup, Restart, Throttle
from dynamo.replay.trace import Stretch, StretchTree, Trace, TraceRequest
from dynamo.scheduling import SchedulerOptions
from support.properties import examples

OPTIONS = SchedulerOptions(num_gpu_blocks=4096, block_size=16)


def asked(*requests: tuple[float, int, int, int]) -> Trace:
    """Make a trace of (arrival in ms, key of the prompt, prompt tokens, output tokens)."""
    return Trace(
        "hand-made",
        [
            TraceRequest(f"r{number}", at, (Stretch(key, tokens),), output)
            for number, (at, key, tokens, output) in enumerate(requests)
        ],
    )


def replayed(
    trace: Trace, mode: str = "round-robin", options: SchedulerOptions = OPTIONS, **setup: Any
) -> ReplayFigures:
    setup = {"workers": 1, "block_size": options.block_size, **setup}
    return run_replay(trace, ReplaySetup(**setup), options, frontend_of(mode, options), mode=mode)


# -- the exact cases of the mock engine ------------------------------------------------------------------------------


def test_one_request_takes_what_its_passes_take() -> None:
    figures = replayed(asked((0, 1, 562, 4)))
    (request,) = figures.requests
    assert request.ttft_ms == pytest.approx(25.1675, abs=1e-3)
    assert request.ttst_ms == pytest.approx(6.2021, abs=1e-3)
    assert request.e2e_latency_ms == pytest.approx(43.776, abs=1e-3)
    assert figures.report()["mean_ttft_ms"] == pytest.approx(25.1675, abs=1e-3)


def test_a_worker_has_its_own_speed_and_may_change_it() -> None:
    requests = asked(*((at, at, 562, 4) for at in (0, 1_000, 2_000, 3_000)))
    usual, mixed, throttled = (
        [each.e2e_latency_ms or 0.0 for each in replayed(requests, workers=2, **setup).requests]
        for setup in ({}, {"speeds": (1.0, 0.5)}, {"throttles": (Throttle(0.5, 0, 0.25), Throttle(0.5, 1, 2.0))})
    )
    assert usual == [pytest.approx(43.776, abs=1e-3)] * 4
    assert mixed == [pytest.approx(ms * factor) for ms, factor in zip(usual, (1, 2, 1, 2), strict=True)]
    assert throttled == [pytest.approx(ms * factor) for ms, factor in zip(usual, (1, 1, 4, 0.5), strict=True)]


def test_two_requests_of_one_moment_are_one_batch() -> None:
    assert [r.ttft_ms for r in replayed(asked((0, 1, 562, 4), (0, 2, 200, 4))).requests] == [
        pytest.approx(28.316, abs=1e-3)
    ] * 2


def test_a_request_in_the_middle_of_a_pass_waits_for_its_end() -> None:
    late = replayed(asked((0, 1, 562, 8), (40, 2, 800, 1))).requests[1]
    assert late.first_admit_ms == pytest.approx(43.776, abs=1e-3)
    assert late.ttft_ms == pytest.approx(38.898, abs=1e-3)


def test_a_prompt_that_comes_again_reuses_all_but_its_last_block() -> None:
    again = replayed(asked((0, 1, 560, 4), (200, 1, 560, 4))).requests[1]
    assert again.reused_input_tokens == 544
    assert again.ttft_ms == pytest.approx(16.744, abs=1e-3)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    assert replayed(asked((0, 1, 20_000, 1))).requests[0].ttft_ms == pytest.approx(415.183, abs=1e-3)


# -- what every replay promises --------------------------------------------------------------------------------------


@examples(25, deadline=None)
@given(data=st.data())
def test_every_request_ends_and_tokens_add_up(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    shape = TraceShape(requests=30, rate=data.draw(st.sampled_from([5.0, 60.0])), prompt_tokens=200, output_tokens=8)
    trace = generate(shape, seed)
    options = SchedulerOptions(num_gpu_blocks=data.draw(st.sampled_from([40, 200])), block_size=16)
    restarts = (Restart(0.4, "worker", 1), Restart(0.6, "router"))
    setup = ReplaySetup(
        workers=data.draw(st.integers(2, 3)),
        frontends=data.draw(st.integers(1, 2)),
        seed=seed,
        concurrency=data.draw(st.sampled_from([None, 1, 7])),
        restarts=data.draw(st.sampled_from([(), restarts])),
    )
    mode = data.draw(st.sampled_from(COUNTING_MODES))
    figures = run_replay(trace, setup, options, frontend_of(mode, options), mode=mode)
    assert sorted(r.request_id for r in figures.requests) == sorted(r.request_id for r in trace.requests)
    wanted = {r.request_id: r for r in trace.requests}
    for request in figures.requests:
        if request.status == "rejected":
            assert wanted[request.request_id].prompt_tokens >= options.num_gpu_blocks * 16
            continue
        assert request.status == "finished"
        room = options.num_gpu_blocks * 16 - request.input_tokens
        assert request.output_tokens == min(wanted[request.request_id].output_tokens, room)
        assert request.arrival_ms <= request.first_admit_ms <= request.first_token_ms <= request.last_token_ms  # type: ignore[operator]
        assert 0 <= request.reused_input_tokens < request.input_tokens
    if not setup.restarts and not figures.preemptions:
        computed = sum(r.input_tokens - r.reused_input_tokens for r in figures.requests if r.status == "finished")
        assert figures.committed_prefill_tokens == computed
    assert figures.digest == run_replay(trace, setup, options, frontend_of(mode, options), mode=mode).digest


def test_a_sped_up_trace_arrives_sooner_and_a_closed_loop_never_has_more_in_flight() -> None:
    trace = generate(TraceShape(requests=40, rate=10.0, prompt_tokens=300, output_tokens=8), 0)
    usual, fast = replayed(trace), replayed(trace, arrival_speedup_ratio=4.0)
    assert fast.requests[-1].arrival_ms == pytest.approx(usual.requests[-1].arrival_ms / 4)
    closed = replayed(trace, concurrency=3).requests
    for request in closed:
        open_then = sum(r.arrival_ms <= request.arrival_ms < (r.last_token_ms or 0.0) for r in closed)
        assert open_then <= 3


def test_a_turn_is_sent_after_the_answer_to_the_one_before() -> None:
    first = TraceRequest("a", 10.0, (Stretch(1, 100),), 4, session_id="s")
    second = TraceRequest("b", 0.0, (Stretch(1, 150),), 4, session_id="s", delay_ms=70.0)
    a, b = replayed(Trace("turns", [second, first])).requests
    assert (a.request_id, b.request_id) == ("a", "b")
    assert b.arrival_ms == pytest.approx((a.last_token_ms or 0.0) + 70.0)


def test_a_prompt_larger_than_a_cache_is_rejected_and_the_rest_goes_on() -> None:
    figures = replayed(
        asked((0, 1, 900, 2), (0, 2, 100, 2)), options=SchedulerOptions(num_gpu_blocks=50, block_size=16)
    )
    assert [request.status for request in figures.requests] == ["rejected", "finished"]


def test_modes_spread_over_workers() -> None:
    trace = asked(*((20.0 * n, n, 400, 3) for n in range(40)))
    for mode in COUNTING_MODES:
        counts = replayed(trace, mode, workers=4).worker_requests
        assert sum(counts) == 40
        assert min(counts) >= 1
    assert replayed(trace, "round-robin", workers=4).worker_requests == [10] * 4


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        ({"workers": 0}, "workers"),
        ({"concurrency": 0}, "concurrency"),
        ({"arrival_speedup_ratio": 0.0}, "arrival_speedup_ratio"),
        ({"event_loss": 2.0}, "event_loss"),
        ({"kv_event_lag_ms": -1.0}, "kv_event_lag_ms"),
        ({"speeds": (1.0, 0.0)}, "speeds"),
        ({"throttles": (Throttle(0.5, 9, 0.5),)}, "throttles"),
        ({"restarts": (Restart(2.0, "worker"),)}, "restarts"),
    ],
)
def test_a_setup_that_cannot_be_is_an_error_that_names_its_member(setup: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        replayed(asked((0, 1, 10, 1)), **setup)


# -- events, losses, restarts ----------------------------------------------------------------------------------------


class Truthful:
    """A frontend that routes in turn and keeps the block names that events tell it."""

    reads_events = True

    def __init__(self) -> None:
        self.turns = count()
        self.worker_ids: list[int] = []
        self.held: dict[int, set[int]] = {}
        self.seen: dict[int, list[int]] = {}

    def set_workers(self, worker_ids: Sequence[int]) -> None:
        self.worker_ids = sorted(worker_ids)

    def route(self, flight: Flight, now_ms: float) -> Routed:
        if not self.worker_ids:
            raise WorkerUnavailable
        return Routed(self.worker_ids[next(self.turns) % len(self.worker_ids)])

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, Routed]]:
        return iter(())

    def would_choose(self, flight: Flight, now_ms: float) -> int | None:
        return None

    def booked_elsewhere(self, flight: Flight, booking_id: str, routed: Routed, now_ms: float) -> None: ...

    def first_token(self, booking_id: str, now_ms: float) -> None: ...

    def end(self, booking_id: str, now_ms: float) -> None: ...

    def apply(self, event: RouterEvent, now_ms: float) -> None:
        self.seen.setdefault(event.worker_id, []).append(event.event.event_id)
        held, data = self.held.setdefault(event.worker_id, set()), event.event.data
        assert data != "cleared"
        if data.stored is not None:
            parent = data.stored.parent_hash
            assert parent is None or parent in held
            held.update(block.block_hash for block in data.stored.blocks)
        if data.removed is not None:
            held.difference_update(data.removed.block_hashes)

    def forget(self, worker_id: int) -> None:
        self.held.pop(worker_id, None)


def followed(trace: Trace, blocks: int = 60, **setup: Any) -> tuple[ReplayFigures, list[Truthful]]:
    made: list[Truthful] = []

    def make(seed: int) -> Truthful:
        made.append(Truthful())
        return made[-1]

    options = SchedulerOptions(num_gpu_blocks=blocks, block_size=16)
    return run_replay(trace, ReplaySetup(workers=2, **setup), options, make, mode="truthful"), made


TRACE = generate(TraceShape(requests=60, rate=20.0, prompt_tokens=250, output_tokens=20), 9)


def test_events_arrive_in_order_and_without_a_gap() -> None:
    _, (frontend,) = followed(TRACE)
    for numbers in frontend.seen.values():
        assert numbers == list(range(1, len(numbers) + 1))
    assert all(len(held) <= 60 for held in frontend.held.values())
    assert len(frontend.held) == 2


@pytest.mark.parametrize("setup", [{"event_loss": 0.2}, {"event_loss": 0.3, "kv_event_lag_ms": 30.0}])
def test_lost_events_are_asked_for_until_the_index_is_whole(setup: dict[str, Any]) -> None:
    _, (whole,) = followed(TRACE)
    figures, (frontend,) = followed(TRACE, **setup)
    assert figures.lost_events > 5
    assert figures.gap_repairs > 3
    for worker_id, held in frontend.held.items():  # all but what follows the last gap, which nothing shows
        assert len(held ^ whole.held[worker_id]) <= 12


def test_a_frontend_that_comes_back_is_told_what_workers_hold() -> None:
    _, (whole,) = followed(TRACE)
    figures, (_, late) = followed(TRACE, restarts=(Restart(0.5, "router"),))
    assert late.held == whole.held
    assert figures.exact_after_ms is not None
    assert 0 < figures.exact_after_ms < 500


def test_the_requests_of_a_lost_worker_go_on_at_others() -> None:
    figures, (frontend,) = followed(TRACE, 200, restarts=(Restart(0.5, "worker", 1, down_ms=400.0),))
    assert [request.status for request in figures.requests] == ["finished"] * 60
    moved = [request for request in figures.requests if request.moves]
    assert moved
    assert all(r.output_tokens == t.output_tokens for r, t in zip(figures.requests, TRACE.requests, strict=True))
    assert len(frontend.held) == 2


def test_without_workers_requests_fail_and_the_replay_ends() -> None:
    restarts = (Restart(0.2, "worker", 0, down_ms=1e9), Restart(0.2, "worker", 1, down_ms=1e9))
    figures, _ = followed(TRACE, restarts=restarts)
    assert {request.status for request in figures.requests} == {"finished", "failed"}


# -- KV routing ------------------------------------------------------------------------------------------------------


SMALL = SchedulerOptions(num_gpu_blocks=24 * 512 // 16, block_size=16)
CHATTY = generate(TraceShape(requests=120, rate=30.0, prompt_tokens=512, output_tokens=10), 4)


def compared(mode: str, **setup: Any) -> ReplayFigures:
    return run_replay(CHATTY, ReplaySetup(workers=4, **setup), SMALL, frontend_of(mode, SMALL), mode=mode)


def test_kv_routing_reuses_far_more_than_round_robin_and_less_than_the_pooled_cache() -> None:
    blind, aware = compared("round-robin"), compared("kv:default")
    assert aware.hit_rate > 1.3 * blind.hit_rate
    assert aware.hit_rate < aware.pooled_hit_rate + 0.02
    assert aware.digest == compared("kv:default").digest


def test_kv_routing_without_events_still_ends_every_request() -> None:
    figures = compared("kv:default,events=off", publishes_events=False)
    assert figures.finished == 120


def test_frontends_that_tell_each_other_choose_as_each_other_would_have_chosen() -> None:
    told = compared("kv:default", frontends=3, replica_sync_ms=0.5, compares_frontends=True)
    apart = compared("kv:default", frontends=3, replica_sync_ms=None, compares_frontends=True)
    assert told.equal_choices is not None
    assert apart.equal_choices is not None
    assert told.equal_choices > apart.equal_choices
    assert told.equal_choices > 0.8  # ties are broken by chance


def test_asking_what_a_frontend_would_choose_changes_nothing() -> None:
    assert (
        compared("kv:default", frontends=2, compares_frontends=True).digest
        == compared("kv:default", frontends=2).digest
    )


def test_a_clock_gives_the_cost_of_routing_and_changes_nothing() -> None:
    ticks = iter(range(1_000_000))
    measured = run_replay(
        CHATTY, ReplaySetup(workers=4), SMALL, frontend_of("kv:default", SMALL), mode="kv:default",
        clock=lambda: next(ticks) * 1e-6,
    )  # fmt: skip
    assert measured.routing.mean_decision_us == 1.0
    assert measured.routing.events_us_per_request > 1.0
    assert measured.digest == compared("kv:default").digest


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("kv:nonsense", "nonsense"),
        ("fastest", "fastest"),
        ("kv:default,credit=1", "credit"),
        ("kv:default,overlap_score_credit=much", "much"),
        ("kv:default,events=3", "events"),
    ],
)
def test_a_mode_that_does_not_exist_is_an_error_that_names_it(mode: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        frontend_of(mode, SMALL)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_a_summary_is_that_of_the_sorted_samples() -> None:
    values = [random.Random(1).expovariate(0.1) for _ in range(500)]
    summary, ordered = summary_of(values), sorted(values)
    assert (summary.min, summary.max, summary.samples) == (ordered[0], ordered[-1], 500)
    assert (summary.median, summary.p90, summary.p99) == (ordered[249], ordered[449], ordered[494])
    assert summary.mean == pytest.approx(sum(values) / 500)
    assert summary_of([]).samples == 0


def test_the_report_has_the_native_names() -> None:
    report = replayed(asked((0, 1, 560, 4), (200, 1, 560, 4))).report()
    assert report["prefix_cache_reused_ratio"] == pytest.approx(544 / 1120, abs=1e-4)
    assert report["committed_prefill_tokens"] == 576
    for latency in ("ttft", "ttst", "tpot", "itl", "e2e_latency"):
        for statistic in ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std"):
            assert isinstance(report[f"{statistic}_{latency}_ms"], float)


def test_one_worker_reuses_as_much_as_the_pooled_cache_of_its_size() -> None:
    trace = generate(TraceShape(requests=60, rate=1.0, prompt_tokens=300, output_tokens=8), 1)
    figures = replayed(trace)
    assert figures.hit_rate == pytest.approx(figures.pooled_hit_rate, abs=0.01)
    assert figures.pooled_hit_rate == pooled_hit_rate(trace, 4096, StretchTree(16))
