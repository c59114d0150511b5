"""The places of a model: who gets one, who is refused, and that none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.admission.model import (
    DEFAULT_QUEUE_AGE_SECONDS,
    MAX_RETRY_SECONDS,
    AdmissionPolicy,
    AdmissionSlot,
    ModelAdmission,
    Reason,
    RequestLimit,
    Shed,
    Urgency,
    urgency_of,
)
from dynamo.protocol.openai.shapes import AgentHints, NvExt
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.cases import each_case
from support.frontend_cluster import cluster, say
from support.properties import examples


def admission(
    limit: str | None = None, *, age: float | None = None, capacity: int | None = None, share: float = 1.0
) -> ModelAdmission:
    policy = AdmissionPolicy(None if limit is None else RequestLimit.parse(limit), age, share)
    made = ModelAdmission("m", policy)
    made.set_capacity(capacity)
    return made


def fill(model: ModelAdmission, count: int, *, now: float = 0.0) -> list[AdmissionSlot]:
    return [model.enter(Urgency.HIGH, now) for _ in range(count)]


def reason_for(model: ModelAdmission, urgency: Urgency = Urgency.NORMAL, now: float = 0.0) -> Reason | None:
    try:
        model.enter(urgency, now).leave()
    except Shed as refused:
        return refused.reason
    return None


# -- places --------------------------------------------------------------------------------------------------------------


@each_case(
    ("in_flight", "refused"),
    [
        (79, {}),
        (80, {Urgency.LOW: Reason.RESERVED}),
        (90, {Urgency.LOW: Reason.RESERVED, Urgency.NORMAL: Reason.RESERVED}),
        (100, dict.fromkeys(Urgency, Reason.PLACES)),
    ],
)
def test_the_last_places_are_for_what_is_more_urgent(in_flight: int, refused: Mapping[Urgency, Reason]) -> None:
    model = admission("100")
    fill(model, in_flight)
    assert {each: why for each in Urgency if (why := reason_for(model, each))} == refused


@each_case(
    ("limit", "capacity", "share", "places"),
    [
        ("64", None, 1.0, 64),
        ("64", 16, 0.25, 16),
        ("1", None, 0.25, 1),
        ("1.5x", 16, 1.0, 24),
        ("1.5x", 16, 0.25, 6),
        ("2x", None, 1.0, None),
        (None, 16, 1.0, None),
    ],
)
def test_a_limit_is_a_number_or_a_multiple_of_what_the_workers_run(
    limit: str | None, capacity: int | None, share: float, places: int | None
) -> None:
    assert admission(limit, capacity=capacity, share=share).limit == places


def test_a_factor_follows_the_workers_that_come_and_go() -> None:
    model = admission("1x", capacity=8)
    before = model.limit
    model.set_capacity(24)
    assert (before, model.limit, model.ignores_factor) == (8, 24, False)
    model.set_capacity(None)
    assert model.ignores_factor


@each_case("text", ["", "x", "0", "-1", "1.5", "0x", "nanx", "infx", "many"])
def test_a_limit_that_is_none_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.{5,90}$"):
        RequestLimit.parse(text)


@each_case(
    ("hints", "urgency"),
    [
        (None, Urgency.NORMAL),
        ({}, Urgency.NORMAL),
        ({"priority": 0}, Urgency.NORMAL),
        ({"priority": 1}, Urgency.HIGH),
        ({"priority": -1}, Urgency.LOW),
        ({"priority": -1, "strict_priority": 1}, Urgency.HIGH),
        ({"strict_priority": 0}, Urgency.NORMAL),
    ],
)
def test_what_a_priority_means(hints: dict[str, int] | None, urgency: Urgency) -> None:
    assert urgency_of(None if hints is None else NvExt(agent_hints=AgentHints(**dict[str, Any](hints)))) is urgency


# -- the age of the queue ------------------------------------------------------------------------------------------------


@each_case(
    ("age", "refused"),
    [(5.0, set()), (5.1, {Urgency.LOW}), (10.1, {Urgency.LOW, Urgency.NORMAL}), (20.1, set(Urgency))],
)
def test_an_old_queue_refuses_the_less_urgent_first(age: float, refused: set[Urgency]) -> None:
    model = admission(age=10.0)
    model.enter(Urgency.NORMAL, 0.0)
    assert {each for each in Urgency if reason_for(model, each, age) is Reason.QUEUE_AGE} == refused


def test_a_long_prefill_beside_free_places_refuses_nobody() -> None:
    model = admission(age=10.0, capacity=4)
    fill(model, 3)
    assert (model.queue_age_seconds(1000.0), reason_for(model, now=1000.0)) == (0.0, None)
    fill(model, 2, now=1000.0)  # now one of five must wait
    assert (model.queue_age_seconds(1000.0), reason_for(model, now=1000.0)) == (1000.0, Reason.QUEUE_AGE)


def test_the_queue_is_as_old_as_the_oldest_without_a_token() -> None:
    model = admission()
    first, second = model.enter(Urgency.NORMAL, 1.0), model.enter(Urgency.NORMAL, 3.0)
    ages = [model.queue_age_seconds(5.0)]
    first.begun(5.0)
    ages.append(model.queue_age_seconds(5.0))
    second.leave()
    assert [*ages, model.queue_age_seconds(5.0)] == [4.0, 2.0, 0.0]


@each_case(
    ("asked", "capacity", "limit"),
    [(None, None, None), (None, 8, DEFAULT_QUEUE_AGE_SECONDS), (0.0, 8, None), (7.0, None, 7.0)],
)
def test_the_age_is_bounded_by_default_only_where_the_places_are_known(
    asked: float | None, capacity: int | None, limit: float | None
) -> None:
    assert admission(age=asked, capacity=capacity).queue_age_limit_seconds == limit


# -- when to come again --------------------------------------------------------------------------------------------------


@each_case(("per_second", "waiting", "seconds"), [(10, 40, 4), (10, 1, 1), (2, 40, 20), (1, 600, 60)])
def test_retry_after_is_the_queue_by_the_rate_of_first_tokens(per_second: int, waiting: int, seconds: int) -> None:
    model, now = admission(), 0.0
    for _ in range(20 * per_second):
        now += 1 / per_second
        model.enter(Urgency.NORMAL, now).begun(now)
    fill(model, waiting, now=now)
    assert model.retry_after_seconds(now) == pytest.approx(seconds, rel=0.1, abs=1)


def test_retry_after_grows_while_nothing_begins_and_has_a_bound() -> None:
    model = admission()
    model.enter(Urgency.NORMAL, 0.0).begun(0.0)
    fill(model, 3)
    seconds = [model.retry_after_seconds(now) for now in (1.0, 10.0, 100.0, 1e6)]
    assert seconds == sorted(seconds)
    assert seconds[-1] == MAX_RETRY_SECONDS


def test_before_anything_has_begun_retry_after_is_what_it_has_taken_so_far() -> None:
    model = admission()
    fresh = model.retry_after_seconds(0.0)
    fill(model, 1)
    assert (fresh, model.retry_after_seconds(0.1), model.retry_after_seconds(7.5)) == (1, 1, 8)


# -- properties ----------------------------------------------------------------------------------------------------------

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["enter", "begun", "leave", "leave again", "capacity"]),
        st.integers(0, 50),
        st.sampled_from(list(Urgency)),
        st.floats(0.0, 3.0),
    ),
    max_size=80,
)
LIMITS = st.sampled_from([None, "1", "7", "20", "1x", "2.5x"])


@given(MOVES, LIMITS, st.sampled_from([None, 0.0, 2.0]))
@examples(300)
def test_no_place_is_lost_or_given_twice_whatever_happens(
    moves: list[tuple[str, int, Urgency, float]], limit: str | None, age: float | None
) -> None:
    model, now = admission(limit, age=age, capacity=5), 0.0
    held: list[AdmissionSlot] = []
    begun: set[AdmissionSlot] = set()
    left: list[AdmissionSlot] = []
    refusals: list[int] = []
    for what, number, urgency, seconds in moves:
        now += seconds
        if what == "enter":
            try:
                held.append(model.enter(urgency, now))
            except Shed as refused:
                refusals.append(refused.retry_after_seconds)
        elif what == "capacity":
            model.set_capacity(number or None)
        elif what == "leave again" and left:
            left[number % len(left)].leave()
            left[number % len(left)].begun(now)
        elif held and what == "begun":
            place = held[number % len(held)]
            place.begun(now)
            begun.add(place)
        elif held and what == "leave":
            place = held.pop(number % len(held))
            place.leave()
            left.append(place)
        assert model.in_flight == len(held)
        assert model.waiting == sum(place not in begun for place in held)
        oldest = min((place.since for place in held if place not in begun), default=now)
        assert model.queue_age_seconds(now) in (0.0, pytest.approx(now - oldest))
    assert all(1 <= seconds <= MAX_RETRY_SECONDS for seconds in refusals)
    for place in held:
        place.leave()
    assert (model.in_flight, model.waiting, model.queue_age_seconds(now)) == (0, 0, 0.0)


@given(st.integers(0, 60), st.integers(1, 50), st.floats(0.0, 50.0), st.sampled_from([None, 0.0, 10.0]))
@examples(300)
def test_where_the_less_urgent_gets_in_the_more_urgent_does_too(
    in_flight: int, limit: int, waited: float, age: float | None
) -> None:
    model = admission(str(limit), age=age, capacity=5)
    fill(model, min(in_flight, limit)) if age is None or not waited else fill(model, min(in_flight, limit, 1))
    welcome = [reason_for(model, each, waited) is None for each in sorted(Urgency)]
    assert welcome == sorted(welcome)


# -- a frontend ----------------------------------------------------------------------------------------------------------

HIGH = {"x-dynamo-request-priority": "1"}


class Held:
    """A worker's script: nothing before `release`, then a word."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await self.release.wait()
        await say("ok")(body, context, sink)


async def test_a_full_model_refuses_in_both_shapes_before_it_tokenises_and_others_are_served(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_per_model=RequestLimit.parse("2")) as house:
        held = Held()
        await house.worker(held, model="full")
        await house.worker(say("hello"), model="free", component="other")
        first = [house.client.begin_chat("hi", model="full") for _ in range(2)]
        served = house.frontend.models.lookup("full")
        assert served is not None
        while served.admission.in_flight < 2:
            await asyncio.sleep(0)
        tokenised = house.metric("dynamo_frontend_tokenize_seconds_count")
        answer = await house.client.chat("hi", model="full")
        assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (529, "Overloaded", "overloaded")
        assert answer.json["message"] == answer.json["error"]["message"] == "Service temporarily overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= MAX_RETRY_SECONDS
        assert house.metric("dynamo_frontend_tokenize_seconds_count") == tokenised
        assert house.metric("dynamo_frontend_model_shed_total", model="full", reason="places") == 1
        labels = {"model": "full", "endpoint": "chat_completions"}
        assert house.metric("dynamo_frontend_model_rejection_total", **labels) == 1
        assert (await house.client.chat("hi", model="free")).status == 200
        held.release.set()
        for each in first:
            await each.done()
        assert (await house.client.chat("hi", model="full")).status == 200
        assert (served.admission.in_flight, served.admission.waiting) == (0, 0)


async def test_a_request_of_higher_priority_gets_the_place_that_was_kept_for_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_per_model=RequestLimit.parse("10")) as house:
        held = Held()
        worker = await house.worker(held)
        first = [house.client.begin_chat("hi") for _ in range(9)]
        served = house.frontend.models.lookup("m")
        assert served is not None
        while served.admission.in_flight < 9:
            await asyncio.sleep(0)
        assert (await house.client.chat("hi")).status == 529
        assert house.metric("dynamo_frontend_model_shed_total", model="m", reason="reserved") == 1
        urgent = house.client.begin_chat("hi", headers=HIGH)
        while served.admission.in_flight < 10:
            await asyncio.sleep(0)
        assert (await house.client.chat("hi", headers=HIGH)).status == 529
        held.release.set()
        for each in [*first, urgent]:
            await each.done()
        assert worker.requests[-1]["routing"] == {"priority": 1, "priority_jump": 1.0}


@pytest.mark.parametrize("script", ["raise", "leave"])
@pytest.mark.process  # computes for seconds
async def test_a_request_that_fails_or_whose_client_leaves_gives_its_place_back(tmp_path: Path, script: str) -> None:
    async with cluster(tmp_path, max_requests_per_model=RequestLimit.parse("1")) as house:
        worker = await house.worker(Held())
        served = house.frontend.models.lookup("m")
        assert served is not None
        exchange = house.client.begin_chat("hi")
        await worker.started.wait()
        if script == "leave":
            exchange.disconnect()
        else:
            await worker.stop()
        await exchange.done()
        assert (served.admission.in_flight, served.admission.waiting) == (0, 0)


async def test_health_says_what_is_in_flight_and_why_requests_are_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_per_model=RequestLimit.parse("1")) as house:
        held = Held()
        worker = await house.worker(held)
        idle = (await house.client.get("/health")).json
        exchange = house.client.begin_chat("hi")
        await worker.started.wait()
        busy = await house.client.get("/health")
        assert (busy.status, busy.json["status"], idle.keys()) == (200, "healthy", {"status", "endpoints", "instances"})
        (load,) = busy.json["load"]
        assert load.pop("queue_age_seconds") >= 0
        assert load == {"model": "m", "namespace": "ns", "in_flight": 1, "waiting": 1}
        assert busy.json["degraded"] == ["model m: 1 request(s) in flight of 1 allowed"]
        held.release.set()
        await exchange.done()
        assert (await house.client.get("/health")).json == idle


async def test_health_says_how_late_the_loop_ran(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        house.frontend.metrics.event_loop.lag.set(2.5)
        body = (await house.client.get("/health")).json
        assert (body["status"], body["degraded"]) == ("healthy", ["the event loop ran a timer 2.5 s late"])


async def test_the_age_of_the_queue_is_a_gauge(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        held = Held()
        worker = await house.worker(held)
        exchange = house.client.begin_chat("hi")
        await worker.started.wait()
        now = asyncio.get_running_loop().time()
        house.frontend.models.measure(now + 30)
        assert house.metric("dynamo_frontend_model_queue_age_seconds", model="m") == pytest.approx(30, abs=1)
        held.release.set()
        await exchange.done()
        house.frontend.models.measure(now + 60)
        assert house.metric("dynamo_frontend_model_queue_age_seconds", model="m") == 0
