"""R10 clients that leave in every phase, R12 more requests than anybody could serve."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from support.http_client import CHAT, Exchange, ask, chat, exchange, script
from support.processes import Cluster, Frontend, Worker, until
from support.scenario_table import record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(900),
]

TOLD_WITHIN_SECONDS = 0.1
REFUSED_WITHIN_SECONDS = 0.05


def p99(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def health(frontend: Frontend) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frontend.get("/health")[1])
    return found


# -- R12 -----------------------------------------------------------------------------------------------------------------

# Capacity is set by the engine's places and not by a processor: two workers run 8 requests each, a request takes two
# seconds. So ten times of it are 80 requests a second, which is little work for a frontend.
SLOTS, WORKERS, TOKENS, PACE_SECONDS = 8, 2, 20, 0.1
CAPACITY_PER_SECOND = SLOTS * WORKERS / (TOKENS * PACE_SECONDS)
SECONDS, WARM_SECONDS = 16.0, 4.0
ANSWER = "abcdefghijklmnopqrst"
PRIORITY = "x-dynamo-request-priority"


@dataclass
class Load:
    """What became of the requests of one stage."""

    goodput: float = 0.0  # whole answers per second, once it is warm
    statuses: Counter[int] = field(default_factory=Counter)
    refusals: list[float] = field(default_factory=list)  # seconds until a refusal was read
    floor: list[float] = field(default_factory=list)  # the same of the least that this server can be asked
    by_priority: dict[int, list[bool]] = field(default_factory=dict)  # served or not
    broken: list[str] = field(default_factory=list)
    hung: int = 0

    @property
    def slow_refusals(self) -> float:
        """How much longer than the least a refusal took, of 99 in 100 each: the rest is this machine's own delay."""
        return max(0.0, p99(self.refusals) - p99(self.floor))


async def offer(port: int, model: str, per_second: float, *, seed: int, high: float = 0.0) -> Load:
    """An open loop: requests come when they come, whatever became of those before. `high`: this part has priority 1."""
    rng = random.Random(seed)
    load, loop = Load(), asyncio.get_running_loop()
    began = loop.time()
    finished: list[float] = []

    async def one(priority: int) -> None:
        headers = script(["say", ANSWER, PACE_SECONDS]) | {PRIORITY: str(priority)}
        sent = loop.time()
        try:
            async with asyncio.timeout(60):
                reply = await ask(port, CHAT, chat(model), headers=headers)
        except TimeoutError:
            load.hung += 1
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            load.broken.append(f"{type(error).__name__}: {error}")
            return
        load.statuses[reply.status] += 1
        load.by_priority.setdefault(priority, []).append(reply.status == 200)
        if reply.status == 200:
            finished.append(loop.time() - began)
            if reply.text != ANSWER:
                load.broken.append(f"half an answer: {reply.text!r}")
            return
        load.refusals.append(loop.time() - sent)
        seconds = reply.headers.get("retry-after", "none")
        if not (reply.status in (429, 503, 529) and seconds.isdigit() and 1 <= int(seconds) <= 60):
            load.broken.append(f"{reply.status}, retry-after {seconds}: {reply.body!r}")

    async def look() -> None:
        while True:
            sent = loop.time()
            await ask(port, "/live")
            load.floor.append(loop.time() - sent)
            await asyncio.sleep(0.05)

    looking = loop.create_task(look())
    async with asyncio.TaskGroup() as group:
        due = began
        while due < began + SECONDS:
            await asyncio.sleep(due - loop.time())
            group.create_task(one(1 if rng.random() < high else 0))
            due += rng.expovariate(per_second)
    looking.cancel()
    await asyncio.wait({looking})
    served = sum(WARM_SECONDS <= at < SECONDS for at in finished)
    load.goodput = served / (SECONDS - WARM_SECONDS)
    return load


async def settled(frontend: Frontend, workers: Sequence[Worker]) -> None:
    """Nothing is left of what came before."""
    await until(lambda: "load" not in health(frontend), lambda: f"no load: {health(frontend)}")
    for worker in workers:
        await worker.idle()


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[Frontend, list[Worker]]]:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", "--max-requests-per-model", "1.5x", "--router-mode", "least-loaded")
        places = {"DYN_ENGINE_REQUEST_LIMIT": str(SLOTS), "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4"}
        workers = [
            cluster.worker(f"w{number}", "crowded", SCRIPTED_MAX_NUM_SEQS=str(SLOTS), **places)
            for number in range(WORKERS)
        ]
        cluster.wait_ready(frontend, *workers)
        yield frontend, workers


async def test_goodput_past_the_knee_is_that_of_the_peak_and_the_rest_is_told_at_once(
    crowded: tuple[Frontend, list[Worker]], capsys: pytest.CaptureFixture[str]
) -> None:
    frontend, workers = crowded
    peak = await offer(frontend.port, "crowded", CAPACITY_PER_SECOND, seed=1)
    stages = {1: peak}
    for factor in (2, 5, 10):
        await settled(frontend, workers)
        stages[factor] = await offer(frontend.port, "crowded", factor * CAPACITY_PER_SECOND, seed=factor)
        if stages[factor].goodput < 0.9 * peak.goodput or stages[factor].slow_refusals > REFUSED_WITHIN_SECONDS:
            await settled(frontend, workers)  # a second look: this machine may have had something else to do
            stages[factor] = await offer(frontend.port, "crowded", factor * CAPACITY_PER_SECOND, seed=100 + factor)
    await settled(frontend, workers)
    for factor, load in stages.items():
        record(
            f"R12 {factor}x of what the engines can serve",
            sent=load.statuses.total() + load.hung + len(load.broken),
            lost=len(load.broken),
            hung=load.hung,
            recovery_ms=[1000 * each for each in load.refusals],
            note=f"{load.goodput:.1f} answers/s ({load.goodput / peak.goodput:.0%} of 1x); {len(load.refusals)} refused, the "
            f"times are theirs; /live took {1000 * statistics.median(load.floor):.0f} ms (p50), "
            f"{1000 * p99(load.floor):.0f} ms (p99) meanwhile",
        )
        with capsys.disabled():
            print(
                f"\n  {factor}x: {load.goodput:.1f}/s, {dict(load.statuses)}, refused after "
                f"{1000 * p99(load.refusals):.0f} ms (p99), /live {1000 * p99(load.floor):.0f} ms (p99)",
                end="",
            )
    for load in stages.values():
        assert (load.hung, load.broken) == (0, [])
        assert load.statuses.keys() <= {200, 529}
    for factor in (2, 5, 10):
        assert stages[factor].goodput >= 0.9 * peak.goodput, factor
        assert stages[factor].slow_refusals <= REFUSED_WITHIN_SECONDS, factor


async def test_past_the_knee_the_urgent_go_first(
    crowded: tuple[Frontend, list[Worker]], capsys: pytest.CaptureFixture[str]
) -> None:
    frontend, workers = crowded
    load = await offer(frontend.port, "crowded", 5 * CAPACITY_PER_SECOND, seed=3, high=0.15)
    await settled(frontend, workers)
    served = {priority: sum(found) / len(found) for priority, found in load.by_priority.items()}
    record(
        "R12 5x, 15 % of it with priority 1",
        sent=load.statuses.total() + load.hung,
        lost=len(load.broken),
        hung=load.hung,
        note=f"served: {served[1]:.0%} of priority 1, {served[0]:.0%} of priority 0",
    )
    with capsys.disabled():
        print(f"\n  served: {served[1]:.0%} of priority 1, {served[0]:.0%} of priority 0", end="")
    assert (load.hung, load.broken) == (0, [])
    assert served[1] > 1.3 * served[0]
    told = {one["priority"] for worker in workers for one in worker.events() if one["event"] == "generate"}
    assert told == {0, 1}  # and the engines hear of it


# -- R10 -----------------------------------------------------------------------------------------------------------------

EACH = 28  # times each phase: 224 in all
SLOWLY = ["say", "x" * 5000, 0.005]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "K" * 5000
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@dataclass
class Phase:
    """A moment at which a client leaves: what it asked, what it waits for, and who must hear of its going."""

    name: str
    worker: Worker
    request: dict[str, Any]
    steps: Sequence[Any]
    moment: Callable[[Exchange, str], Awaitable[object]]
    streams: int = 1


async def leave(frontend: Frontend, phase: Phase, tag: str, *, politely: bool) -> list[float]:
    """One client that leaves; after how many seconds the engine heard of it, for each stream."""
    async with exchange(frontend.port, CHAT, phase.request, headers=script(*phase.steps, tag=tag)) as one:
        await phase.moment(one, tag)
        left_at = time.monotonic()
        one.leave(politely=politely)
        aborts = await phase.worker.sees("abort", tag, phase.streams)
        await phase.worker.sees("finally", tag, phase.streams)
        return [event["at"] - left_at for event in aborts]


async def leave_the_queue(frontend: Frontend, worker: Worker, tag: str, *, politely: bool) -> list[float]:
    """The same of a request that waits for a place: the engine never hears of it at all."""
    async with exchange(frontend.port, CHAT, chat(worker.model), headers=script(["wait"], tag=tag)) as one:
        await until(lambda: worker.metric("dynamo_work_handler_queue_depth") == 1)
        left_at = time.monotonic()
        one.leave(politely=politely)
        await until(lambda: worker.metric("dynamo_work_handler_queue_depth") == 0)
        return [time.monotonic() - left_at]


async def third_event(one: Exchange, tag: str) -> None:
    for _ in range(3):
        await one.event()


def phases(plain: Worker, prefill: Worker, parsed: Worker) -> list[Phase]:
    async def begun(worker: Worker, tag: str) -> None:
        await worker.sees("generate", tag)

    def said(worker: Worker, times: int = 1) -> Callable[[Exchange, str], Awaitable[object]]:
        return lambda _, tag: worker.sees("first", tag, times)

    called = chat("parsed", stream=True, tools=TOOLS)
    return [
        Phase("prefill", plain, chat("plain", stream=True), [["wait"]], lambda _, tag: begun(plain, tag)),
        Phase("prefill in a pair", prefill, chat("pair", stream=True), [["wait"]], lambda _, tag: begun(prefill, tag)),
        Phase("first token", plain, chat("plain", stream=True), [["say", "x"], ["wait"]], lambda one, _: one.event()),
        Phase("decode", plain, chat("plain", stream=True), [SLOWLY], third_event),
        Phase("unary", plain, chat("plain"), [SLOWLY], said(plain)),
        Phase("n = 3", plain, chat("plain", stream=True, n=3), [SLOWLY], said(plain, 3), 3),
        Phase("a tool call", parsed, called, [["say", CALL, 0.005]], said(parsed)),
    ]


async def test_who_leaves_is_heard_of_in_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        narrow = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "1"}
        plain, parsed, queue = (
            cluster.worker("plain", "plain"),
            cluster.worker("parsed", "parsed", SCRIPTED_TOOL_PARSER="hermes"),
            cluster.worker("narrow", "narrow", **narrow),
        )
        prefill = cluster.worker("prefill", "pair", SCRIPTED_ROLE="prefill")
        decode = cluster.worker("decode", "pair", SCRIPTED_ROLE="decode")
        cluster.wait_ready(frontend, plain, parsed, queue, decode)
        prefill.wait_ready()
        await until(lambda: present(frontend, "pair") == {"decode", "prefill"})
        workers = [plain, parsed, queue, decode, prefill]
        told: dict[str, list[float]] = {}

        async def all_phases(look: int) -> None:
            for phase in phases(plain, prefill, parsed):
                told[phase.name] = []
                for number in range(EACH):
                    tag = f"{phase.name}-{look}-{number}"
                    told[phase.name] += await leave(frontend, phase, tag, politely=bool(number % 2))
            told["queued"] = []
            async with exchange(frontend.port, CHAT, chat("narrow"), headers=script(["wait"], tag=f"occupant-{look}")):
                await queue.sees("generate", f"occupant-{look}")
                for number in range(EACH):
                    tag = f"queued-{look}-{number}"
                    told["queued"] += await leave_the_queue(frontend, queue, tag, politely=bool(number % 2))

        await all_phases(0)
        looks = 1
        if p99([*chain(*told.values())]) > TOLD_WITHIN_SECONDS:
            await all_phases(1)  # a second look: this machine may have had something else to do
            looks = 2
        await settled(frontend, workers)
        delays = [*chain(*told.values())]
        left = EACH * len(told)
        record(
            f"R10 {left} clients that leave, in {len(told)} phases",
            sent=left,
            recovery_ms=[1000 * each for each in delays],
            note="from the client's going to the engine's abort (queued: until it has left the queue)",
        )
        with capsys.disabled():
            for name, found in told.items():
                print(
                    f"\n  {name}: {len(found)} told, {1000 * statistics.median(found):.1f} ms (p50), "
                    f"{1000 * p99(found):.1f} ms (p99)",
                    end="",
                )
        assert left >= 200
        assert p99(delays) <= TOLD_WITHIN_SECONDS
        for worker in workers:
            aborts = Counter(one["tag"] for one in worker.events() if one["event"] == "abort")
            ends = Counter(one["tag"] for one in worker.events() if one["event"] == "finally")
            begun = Counter(one["tag"] for one in worker.events() if one["event"] == "generate")
            assert aborts == ends == begun
            assert not [tag for tag in begun if tag.startswith("queued")]
            assert worker.metric("dynamo_engine_request") == worker.metric("dynamo_request_queue") == 0
        assert not decode.events()
        await until(lambda: not left_over(frontend), lambda: f"gauges at 0: {left_over(frontend)}")
        assert f"dynamo_frontend_disconnected_clients {looks * (left + 1)}" in frontend.get("/metrics")[1].decode()


def left_over(frontend: Frontend) -> list[str]:
    """The gauges that say that something is still there; that of the queue's age is set once a second."""
    gauges = ("inflight_requests{", "queued_requests{", "active_requests{", "model_queue_age_seconds{")
    names = tuple(f"dynamo_frontend_{name}" for name in gauges)
    lines = frontend.get("/metrics")[1].decode().splitlines()
    return [line for line in lines if line.startswith(names) and not line.endswith(" 0")]


def present(frontend: Frontend, model: str) -> set[str]:
    """The roles that a model has workers of."""
    body: Mapping[str, Any] = json.loads(frontend.get(f"/v1/models/{model}/ready")[1])
    return {role for one in body.get("namespaces", {}).values() for role in one["present"]}
