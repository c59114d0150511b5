from __future__ import annotations

import asyncio
import platform
from itertools import product
from typing import Any

import pytest

from dynamo.errors import Overloaded
from dynamo.frontend.admission.process import TRANSITIONS, Admission, NotReady, Stage
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.buckets import log_buckets
from dynamo.frontend.base.metrics.requests import RequestMetrics
from dynamo.frontend.base.offload import keep_large_blocks_apart, takes_long
from dynamo.frontend.http.event_stream import EventStream
from dynamo.protocol.openai.sse import KEEP_ALIVE
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

# -- admission -----------------------------------------------------------------------------------------------------------


def test_a_request_beyond_the_bound_is_declined_at_once_and_a_place_freed_is_taken() -> None:
    admission = Admission(2)
    admission.enter()
    admission.enter()
    with pytest.raises(Overloaded):
        admission.enter()
    admission.leave()
    admission.enter()
    assert admission.in_flight == 2


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.STOPPING])
def test_after_draining_began_no_request_is_admitted(stage: Stage) -> None:
    admission = Admission(1)
    admission.move(stage)
    with pytest.raises(NotReady, match="Service is not ready"):
        admission.enter()


@each_case(("before", "after"), list(product(Stage, Stage)))
def test_a_stage_is_left_only_as_the_table_says(before: Stage, after: Stage) -> None:
    admission = Admission(1)
    admission.stage = before
    if after is before or after in TRANSITIONS[before]:
        admission.move(after)
        assert admission.stage is after
    else:
        with pytest.raises(ValueError, match="cannot go from"):
            admission.move(after)


async def test_waiting_for_idle_ends_with_the_last_request() -> None:
    admission = Admission(2)
    admission.enter()
    waiting = asyncio.create_task(admission.wait_idle(60))
    await asyncio.sleep(0)
    admission.leave()
    assert await waiting is True


async def test_waiting_for_idle_gives_up_in_time() -> None:
    admission = Admission(2)
    admission.enter()
    assert await admission.wait_idle(0.001) is False


# -- metrics -------------------------------------------------------------------------------------------------------------


@each_case(
    ("settings", "bounds"),
    [
        ((1, 512, 10), (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)),
        ((50, 128_000, 12), (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)),
        ((50, 32_000, 10), (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)),
        (
            (0.001, 480, 18),
            (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480),
        ),
    ],
)
def test_buckets_are_the_native_ones(settings: tuple[float, float, int], bounds: tuple[float, ...]) -> None:
    assert log_buckets(*settings) == bounds


@each_case("settings", [(0, 1, 5), (2, 1, 5), (1, 2, 1), (1, 2, 65)])
def test_buckets_that_make_no_sense_are_refused(settings: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="need 0 < min < max"):
        log_buckets(*settings)


def test_a_histogram_setting_that_makes_no_sense_names_its_variable() -> None:
    with pytest.raises(ValueError, match="DYN_HISTOGRAM_TTFT_MIN"):
        FrontendMetrics(MetricsRegistry(), env={"DYN_HISTOGRAM_TTFT_MIN": "-1"})


def series(registry: MetricsRegistry) -> dict[str, float]:
    lines = [line for line in registry.expose().decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_request_moves_the_gauges_and_ends_in_the_counters() -> None:
    registry = MetricsRegistry()
    metrics = FrontendMetrics(registry, env={})
    request = metrics.requests.begin("m", "chat_completions", "stream", 10.0)
    now = series(registry)
    assert now['dynamo_frontend_queued_requests{model="m"}'] == 1
    assert now['dynamo_frontend_inflight_requests{model="m"}'] == 1
    request.tokens(1, 10.5)
    now = series(registry)
    assert now['dynamo_frontend_queued_requests{model="m"}'] == 0
    assert now['dynamo_frontend_active_requests{model="m"}'] == 1
    assert now['dynamo_frontend_time_to_first_token_seconds_sum{model="m"}'] == 0.5
    request.tokens(4, 11.5)
    request.finish(12.0, prompt_tokens=3, output_tokens=5, cached_tokens=None)
    request.cancel(13.0)  # too late: the request has ended
    now = series(registry)
    assert now['dynamo_frontend_active_requests{model="m"}'] == 0
    assert now['dynamo_frontend_inflight_requests{model="m"}'] == 0
    assert now['dynamo_frontend_inter_token_latency_seconds_count{model="m"}'] == 4
    assert now['dynamo_frontend_inter_token_latency_seconds_sum{model="m"}'] == 1.0
    assert now['dynamo_frontend_output_tokens_total{model="m"}'] == 5
    assert now['dynamo_frontend_request_duration_seconds_sum{model="m"}'] == 2.0
    labels = 'model="m",endpoint="chat_completions",request_type="stream"'
    assert now[f'dynamo_frontend_requests_total{{{labels},status="success"}}'] == 1
    assert now["dynamo_frontend_disconnected_clients"] == 0


# -- the event stream ----------------------------------------------------------------------------------------------------


class Wire:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.arrived.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.sent) < count:
                self.arrived.clear()
                await self.arrived.wait()


async def test_nothing_is_sent_before_the_first_write() -> None:
    wire = Wire()
    stream = EventStream(wire.send, peek_seconds=60, keep_alive_seconds=None)
    await asyncio.sleep(0)
    assert not wire.sent
    assert not stream.is_committed
    await stream.write(b"data: 1\n\n")
    await stream.end(b"data: [DONE]\n\n")
    assert [message["type"] for message in wire.sent] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]
    assert wire.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream") in wire.sent[0]["headers"]
    assert [message["more_body"] for message in wire.sent[1:]] == [True, False]


async def test_after_the_peek_time_the_headers_go_out_with_a_comment() -> None:
    wire = Wire()
    stream = EventStream(wire.send, peek_seconds=0.001, keep_alive_seconds=None)
    await wire.until(2)
    assert stream.is_committed
    assert wire.sent[1]["body"] == KEEP_ALIVE
    await stream.write(b"data: 1\n\n")
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    await stream.end(b"")


async def test_a_silent_stream_is_kept_alive_and_a_busy_one_is_left_alone() -> None:
    wire = Wire()
    stream = EventStream(wire.send, peek_seconds=60, keep_alive_seconds=0.005)
    await stream.write(b"data: 1\n\n")
    await wire.until(4)
    assert [message["body"] for message in wire.sent[2:4]] == [KEEP_ALIVE, KEEP_ALIVE]
    await stream.end(b"")
    count = len(wire.sent)
    await asyncio.sleep(0.02)
    assert len(wire.sent) == count  # the timer ended with the stream


async def test_a_write_right_behind_the_commit_keeps_the_order() -> None:
    wire = Wire()
    stream = EventStream(wire.send, peek_seconds=60, keep_alive_seconds=None)
    stream._tick()  # the peek time ends in the very turn in which the first token arrives
    await stream.write(b"data: 1\n\n")
    await stream.end(b"")
    assert [message.get("body") for message in wire.sent] == [None, KEEP_ALIVE, b"data: 1\n\n", b""]


def test_a_body_takes_long_by_its_values_and_not_by_its_text() -> None:
    prompt = b'{"messages":[{"role":"user","content":"%b"}]}'
    many = b'{"logit_bias":{%b}}'
    assert not takes_long(prompt % (b"a, b " * 100))
    assert not takes_long(prompt % (b"words, and many more words after them " * 6_000))  # 230 KB
    assert takes_long(prompt % (b"a" * 600_000))
    assert not takes_long(many % b",".join(b'"%d":1' % number for number in range(10_000)))  # 100 KB
    assert takes_long(many % b",".join(b'"%d":1' % number for number in range(20_000)))
    assert takes_long(b'{"x":[%b]}' % (b"[]," * 60_000))


def test_large_blocks_are_kept_apart_unless_the_environment_tunes_the_heap() -> None:
    assert keep_large_blocks_apart({"PATH": "/bin"}) == (platform.libc_ver()[0] == "glibc")
    assert not keep_large_blocks_apart({"MALLOC_ARENA_MAX": "1"})
    assert not keep_large_blocks_apart({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})


def test_the_tokens_of_a_step_are_counted_as_if_they_came_one_by_one() -> None:
    """Requests of two models; one has had no token yet, and two had their last one at another time than the rest."""
    exposed = []
    for is_together in (True, False):
        registry = MetricsRegistry()
        series = FrontendMetrics(registry, env={}).requests
        requests = [series.begin(f"m{number // 4}", "chat_completions", "stream", 0.0) for number in range(8)]
        for number, request in enumerate(requests[1:]):
            request.tokens(1, 1.0 if number not in (2, 5) else 1.25)
        for now in (2.0, 2.5):
            if is_together:
                RequestMetrics.token_each(requests, now)
            else:
                for request in requests:
                    request.tokens(1, now)
        assert [request.generating_seconds for request in requests] == [0.5, 1.5, 1.5, 1.25, 1.5, 1.5, 1.25, 1.5]
        exposed.append(registry.expose())
    assert exposed[0] == exposed[1]
    assert b'inter_token_latency_seconds_count{model="m0"} 7' in exposed[0]
