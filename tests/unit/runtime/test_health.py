"""Readiness, and the canary, in the time of a loop that never waits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from dynamo.runtime.base.settings import CanarySettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.health import Canary, HealthState
from dynamo.runtime.calls.progress import ServingProgress
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.cases import each_case

PATH = "ns.backend.generate"


# -- the verdict


def state(**options: Any) -> HealthState:
    return HealthState(clock=lambda: 12.25, **options)


def test_nothing_served_is_not_ready() -> None:
    assert not state().system_ready()


def test_without_payloads_the_endpoints_decide() -> None:
    health = state()
    health.register("a.b.c")
    health.register("a.b.d")
    both = health.system_ready()
    health.unregister("a.b.d")
    assert (both, health.system_ready()) == (True, False)


def test_an_explicit_starting_status_gives_the_native_behaviour_until_told_otherwise() -> None:
    health = state(starting_ready=False)
    health.register(PATH)
    before, endpoints = health.system_ready(), health.body()["endpoints"]
    health.set_health_status(True)
    assert (before, endpoints, health.system_ready()) == (False, {"generate": "ready"}, True)


def test_endpoints_with_a_payload_decide_alone() -> None:
    health = state(starting_ready=False)
    health.register(PATH, has_payload=True)
    health.register("ns.backend.other")
    health.set_ready("ns.backend.other", False)
    ready = health.system_ready()
    health.set_ready(PATH, False)
    health.set_health_status(True)
    assert (ready, health.system_ready()) == (True, False)


@each_case(
    ("canary", "has_payload", "ready"),
    [(False, False, True), (False, True, True), (True, True, False), (True, False, True)],
)
def test_an_endpoint_begins_ready_unless_a_canary_must_see_it_first(
    canary: bool, has_payload: bool, ready: bool
) -> None:
    health = state(canary_enabled=canary)
    health.register(PATH, has_payload=has_payload)
    assert health.is_ready(PATH) is ready


def test_shutdown_beats_everything() -> None:
    health = state(starting_ready=True)
    health.register(PATH)
    health.begin_shutdown()
    assert health.body()["status"] == "notready"


def test_the_body_counts_uptime_from_the_start_and_shows_the_worse_of_equal_names() -> None:
    now = [10.0]
    health = HealthState(clock=lambda: now[0])
    health.register("ns.a.generate")
    health.register("ns.b.generate")
    health.set_ready("ns.b.generate", False)
    now[0] = 13.5
    assert health.body() == {
        "status": "notready",
        "uptime": {"secs": 3, "nanos": 500_000_000},
        "endpoints": {"generate": "notready"},
        "reason": "ns.b.generate: it was reported so",
    }


def test_an_unknown_endpoint_is_not_ready_and_cannot_become_so() -> None:
    health = state()
    health.set_ready("x.y.z", True)
    health.unregister("x.y.z")
    assert (health.is_ready("x.y.z"), health.body()["endpoints"]) == (False, {})


def test_an_endpoint_that_takes_no_requests_is_not_ready_whatever_is_observed_of_it() -> None:
    health = HealthState(canary_enabled=True)
    health.register("a.b.c", has_payload=True)
    health.unregister("a.b.c")
    health.set_ready("a.b.c", True)  # a request that still ran ended well, or a probe
    health.set_ready("a.b.c", False, "the health check failed: late")
    assert health.reason() == "a.b.c: it takes no requests now"
    health.register("a.b.c", has_payload=True)
    health.set_ready("a.b.c", True)
    assert health.reason() is None


# -- the canary


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer as soon as nothing else is left to do."""

    _ahead = 0.0

    def time(self) -> float:
        return super().time() + self._ahead

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        timers = [handle.when() for handle in scheduled if not handle.cancelled()]
        if not ready and timers:
            self._ahead += max(0.0, min(timers) - self.time())
        super()._run_once()  # type: ignore[misc]


def in_skipping_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a `SkippingLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


Handle = Callable[[Any, Context, ResponseSink], Awaitable[None]]


class Probed:
    """A canary over a handler that can be exchanged."""

    def __init__(self, handle: Handle, *, wait: float = 2.0, timeout: float = 3.0) -> None:
        self.handle = handle
        self.bodies: list[Any] = []
        self.health = HealthState(canary_enabled=True)
        self.health.register(PATH, has_payload=True)
        settings = CanarySettings(True, wait, timeout)
        self.canary = Canary(PATH, self._serve, {"token_ids": [1], "_HEALTH_CHECK": True}, self.health, settings)

    async def _serve(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.bodies.append(body)
        await self.handle(body, context, sink)

    async def __aenter__(self) -> Probed:
        self.canary.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.canary.close()

    @property
    def ready(self) -> bool:
        return self.health.is_ready(PATH)


async def good(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([1], finish_reason="length")


async def raises(body: Any, context: Context, sink: ResponseSink) -> None:
    raise RuntimeError("dead engine")


async def empty(body: Any, context: Context, sink: ResponseSink) -> None:
    return


async def error_finish(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([], finish_reason={"error": "broken"})


async def error_word(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([], finish_reason="error")


async def error_object(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_object({"event": "error", "comment": ["broken"]})


async def error_data(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": {"token_ids": [], "finish_reason": {"error": "broken"}}})


async def hangs(body: Any, context: Context, sink: ResponseSink) -> None:
    await asyncio.Event().wait()


async def stalls_after_the_first_token(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([1])
    await asyncio.Event().wait()


async def fails_after_the_first_token(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_tokens([1])
    raise RuntimeError("dead engine")


async def object_answer(body: Any, context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": {"x": 1}})


@pytest.mark.parametrize("handle", [good, object_answer])
@in_skipping_time
async def test_an_idle_endpoint_becomes_ready_within_three_seconds_of_a_two_second_wait(handle: Handle) -> None:
    async with Probed(handle, wait=2.0) as probed:
        before = probed.ready
        await asyncio.sleep(2.5)
        assert (before, probed.ready) == (False, True)
        assert probed.bodies[0]["_HEALTH_CHECK"] is True


BROKEN = [
    raises,
    empty,
    error_finish,
    error_word,
    error_object,
    error_data,
    hangs,
    stalls_after_the_first_token,
    fails_after_the_first_token,
]


@pytest.mark.parametrize("handle", BROKEN)
@in_skipping_time
async def test_a_broken_engine_turns_notready_and_recovers(handle: Handle) -> None:
    async with Probed(good, wait=2.0, timeout=1.0) as probed:
        await asyncio.sleep(2.5)
        seen = [probed.ready]
        probed.handle = handle
        await asyncio.sleep(5.0)
        seen.append(probed.ready)
        probed.handle = good
        await asyncio.sleep(5.0)
        seen.append(probed.ready)
    assert seen == [True, False, True]


@in_skipping_time
async def test_a_hanging_probe_is_cancelled_inside_the_handler_and_its_context_killed() -> None:
    ended: list[tuple[bool, bool]] = []

    async def hang(body: Any, context: Context, sink: ResponseSink) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append((context.is_killed(), True))
            raise

    async with Probed(hang, wait=1.0, timeout=1.0):
        await asyncio.sleep(2.5)
    assert ended == [(True, True)]


@in_skipping_time
async def test_real_traffic_puts_the_probe_off_and_makes_ready() -> None:
    async with Probed(raises, wait=2.0) as probed:
        for _ in range(10):
            await asyncio.sleep(1.5)
            probed.canary.activity()
        assert (probed.bodies, probed.ready) == ([], True)


@in_skipping_time
async def test_a_probe_that_starves_behind_real_answers_is_no_failure() -> None:
    async with Probed(hangs, wait=2.0, timeout=1.0) as probed:
        await asyncio.sleep(2.5)
        probed.canary.activity()
        await asyncio.sleep(1.0)
        assert (len(probed.bodies), probed.ready) == (1, True)


@in_skipping_time
async def test_probes_repeat_every_wait() -> None:
    async with Probed(good, wait=2.0) as probed:
        await asyncio.sleep(9.0)
        assert len(probed.bodies) == 4


@in_skipping_time
async def test_an_answer_without_end_is_cut_but_healthy() -> None:
    async def endless(body: Any, context: Context, sink: ResponseSink) -> None:
        while not context.is_stopped():
            sink.send_tokens([1])
            await asyncio.sleep(0.5)

    async with Probed(endless, wait=2.0, timeout=1.0) as probed:
        await asyncio.sleep(70.0)
        assert (len(probed.bodies), probed.ready) == (2, True)


@in_skipping_time
async def test_closing_cancels_the_probe_under_way_and_leaves_no_task() -> None:
    probed = Probed(hangs, wait=1.0, timeout=60.0)
    async with probed:
        await asyncio.sleep(2.0)
    await probed.canary.close()
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]


@in_skipping_time
async def test_an_engine_that_swallows_its_cancellation_does_not_stop_the_canary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = asyncio.Event()

    async def stubborn(body: Any, context: Context, sink: ResponseSink) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with Probed(stubborn, wait=1.0, timeout=1.0) as probed:
        await asyncio.sleep(6.0)
        assert (len(probed.bodies), probed.ready) == (2, False)
        may_end.set()
        await asyncio.sleep(0)
    assert "ignores its cancellation" in caplog.text


def test_the_canary_is_off_by_default_and_read_from_the_environment() -> None:
    assert CanarySettings.from_env({}) == CanarySettings(False, 10.0, 3.0)
    env = {
        "DYN_HEALTH_CHECK_ENABLED": "on",
        "DYN_CANARY_WAIT_TIME": "2",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "0.5",
    }
    assert CanarySettings.from_env(env) == CanarySettings(True, 2.0, 0.5)


# -- reasons -------------------------------------------------------------------------------------------------------------


def test_whoever_is_not_ready_says_why_and_whoever_is_has_nothing_to_say() -> None:
    health = state()
    reasons = [health.body()["reason"]]
    health.register(PATH)
    assert "reason" not in health.body()
    health.set_ready(PATH, False, "the health check failed: no item within 3 s")
    reasons.append(health.body()["reason"])
    health.set_ready(PATH, True)
    assert "reason" not in health.body()
    health.unregister(PATH)
    reasons.append(health.body()["reason"])
    health.set_health_status(False)
    reasons.append(health.body()["reason"])
    health.begin_shutdown()
    reasons.append(health.body()["reason"])
    assert reasons == [
        "no endpoint is served yet",
        "ns.backend.generate: the health check failed: no item within 3 s",
        "ns.backend.generate: it takes no requests now",
        "the process was reported not ready, or has not been reported ready yet",
        "the process is shutting down",
    ]


@pytest.mark.parametrize("told", [None, True])
def test_work_that_stands_still_is_a_reason_whatever_was_told(told: bool | None) -> None:
    health, trouble, load = state(starting_ready=told), [""], {"running": 2.0}
    health.register(PATH)
    health.add_trouble(lambda: trouble[0] or None)
    health.add_detail("load", lambda: load)
    before = health.body()
    trouble[0] = "2 request(s), none of them has had a token for 63 s"
    after = health.body()
    load.clear()
    assert (before["status"], "reason" in before, before["load"]) == ("ready", False, {"running": 2.0})
    assert (after["status"], after["reason"], "load" in health.body()) == ("notready", trouble[0], False)


# -- progress ------------------------------------------------------------------------------------------------------------


class Talker:
    """A response that somebody writes, or does not."""

    def __init__(self) -> None:
        self.response_bytes = 0
        self.room = True

    def has_credit(self) -> bool:
        return self.room

    def say(self) -> None:
        self.response_bytes += 1


def watched(limit: float, *talkers: Talker) -> ServingProgress:
    progress = ServingProgress(limit)
    for talker in talkers:
        progress.entered(talker)  # type: ignore[arg-type]
    return progress


@in_skipping_time
async def test_requests_that_all_stand_still_are_a_trouble_after_the_limit() -> None:
    progress = watched(60.0, *(Talker() for _ in range(12)))
    await asyncio.sleep(59.5)
    assert progress.trouble() is None
    await asyncio.sleep(4)
    assert progress.trouble() == "12 request(s), none of them has had a token for 63 s"
    progress.close()


@in_skipping_time
async def test_one_that_moves_is_enough_and_the_longest_silence_is_told_beside_it() -> None:
    silent, talker = Talker(), Talker()
    progress = watched(60.0, silent, talker)
    for _ in range(10):
        await asyncio.sleep(30)
        talker.say()
    await asyncio.sleep(1.5)
    assert (progress.trouble(), progress.longest_silence_seconds > 280) == (None, True)
    assert progress.silent_seconds <= 2
    progress.close()


@in_skipping_time
async def test_a_request_that_ended_by_itself_is_progress_and_one_whose_caller_left_is_none() -> None:
    stuck, answered, left = Talker(), Talker(), Talker()
    progress = watched(60.0, stuck, answered, left)
    await asyncio.sleep(50.5)
    progress.left(left, is_answered=False)  # type: ignore[arg-type]
    await asyncio.sleep(5)
    assert progress.silent_seconds == 55
    progress.left(answered, is_answered=True)  # type: ignore[arg-type]
    await asyncio.sleep(5)
    assert (progress.trouble(), progress.silent_seconds) == (None, 4)
    progress.close()


@in_skipping_time
async def test_a_caller_that_does_not_read_is_no_silence_of_the_engine() -> None:
    slow = Talker()
    slow.room = False
    progress = watched(10.0, slow)
    await asyncio.sleep(100)
    assert (progress.trouble(), progress.longest_silence_seconds) == (None, 0)
    slow.room = True
    await asyncio.sleep(11)
    assert progress.trouble() is not None
    progress.close()


@in_skipping_time
async def test_an_idle_process_has_no_timer_and_silence_begins_anew() -> None:
    talker = Talker()
    progress = watched(10.0, talker)
    await asyncio.sleep(20)
    progress.left(talker, is_answered=False)  # type: ignore[arg-type]
    assert progress.trouble() is None
    await asyncio.sleep(1.5)
    assert (progress._timer, progress.trouble(), progress.silent_seconds, progress.running) == (None, None, 0, 0)


async def test_a_loop_that_was_blocked_is_one_beat_and_a_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now, beats = asyncio.get_running_loop(), [0.0], []
    monkeypatch.setattr(loop, "time", lambda: now[0])
    monkeypatch.setattr(loop, "call_at", lambda when, beat: beats.append((when, beat)))
    progress = watched(10.0, Talker())
    now[0] = 100.0
    beats[-1][1]()
    assert (progress.silent_seconds, progress.loop_lag_seconds, beats[-1][0]) == (1, 99, 101)


@in_skipping_time
async def test_without_a_limit_silence_is_counted_and_no_trouble() -> None:
    progress = watched(0.0, Talker())
    await asyncio.sleep(1000.5)
    assert (progress.trouble(), progress.silent_seconds) == (None, 1000)
    progress.close()
