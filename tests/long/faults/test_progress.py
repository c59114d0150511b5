"""Engines that stop saying anything, networks that stop passing it on, and a client that only sends rubbish."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import string
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.http_client import CHAT, DONE, ask, chat, exchange, script
from support.processes import Cluster, Frontend, Worker, get, until
from support.relay import Relay
from support.scenario_table import record

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("FAULTS" not in os.environ, reason="make test-faults"),
    pytest.mark.timeout(3600),
]

MODEL = "steady"
ANSWER = string.ascii_letters + string.digits
FLOOR_SECONDS = 1.0
SLACK_SECONDS = 4.0  # for a loaded machine, on top of the limit
STALL_MINUTES = float(os.environ.get("STALL_MINUTES", "10"))


def metric(frontend: Frontend, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    found = 0.0
    for line in get(frontend.port, "/metrics")[1].decode().splitlines():
        match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            found += float(match[2])
    return found


@dataclass
class Answer:
    """One streamed answer, and when its tokens came."""

    text: str = ""
    error: Any = None
    at: list[float] = field(default_factory=list)
    is_whole: bool = False

    @property
    def gaps(self) -> list[float]:
        """Between what came, the longest last."""
        return sorted(later - earlier for earlier, later in itertools.pairwise(self.at)) or [0.0]


async def stream(
    port: int,
    steps: Iterable[Any],
    *,
    tag: str,
    patience: float,
    on_token: Callable[[Answer], None] | None = None,
    **body: Any,
) -> Answer:
    """Ask for a stream and read it to its end; TimeoutError when that takes longer than `patience`."""
    answer = Answer()
    async with (
        asyncio.timeout(patience),
        exchange(port, CHAT, chat(MODEL, stream=True, **body), headers=script(*steps, tag=tag)) as one,
    ):
        async for raw in one.reader:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            if line.removeprefix("data: ") == DONE:
                answer.is_whole = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = event["error"]
                continue
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    answer.text += text
                    answer.at.append(time.monotonic())
                    if on_token is not None:
                        on_token(answer)
    return answer


def rewrite(root: Path, *, port: int | None = None, **members: Any) -> int:
    """Change what the instance records that are there say of the way to their workers; the port they said. None removes a
    member."""
    own = 0
    for path in (root / "store").rglob("*"):
        if not path.is_file() or b'"type":"Endpoint"' not in (old := path.read_bytes()):
            continue
        tcp = json.loads(old)["transport"]["tcp"]
        own = int(tcp.split("/", 1)[0].rpartition(":")[2])
        if port is not None:
            old = old.replace(f":{own}/".encode(), f":{port}/".encode())
        fresh = {name: value for name, value in (json.loads(old) | members).items() if value is not None}
        temporary = path.with_name(f".tmp_{path.name[-40:]}")
        temporary.write_bytes(json.dumps(fresh, separators=(",", ":")).encode())
        temporary.rename(path)
    assert own
    return own


def who_has(workers: list[Worker], tag: str) -> Worker:
    """The worker that is serving it now."""
    (found,) = [one for one in workers if one.count("generate", tag) > one.count("finally", tag)]
    return found


@pytest.mark.parametrize("wire", ["mux", "native"])
@pytest.mark.parametrize("others", [1, 0], ids=["another", "nobody"])
async def test_a_worker_that_is_stopped_mid_stream(tmp_path: Path, wire: str, others: int) -> None:
    """R4. A stream of one token in 20 ms, stopped at ten different places."""
    # The end of a request takes six floors, and a worker that is stopped for longer than its lease leaves the store.
    floor = FLOOR_SECONDS if others else FLOOR_SECONDS / 2
    env = {"DYN_STALL_FLOOR_SECS": str(floor), "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0.5"}
    with Cluster(tmp_path, **env) as cluster:
        frontend = cluster.frontend("frontend")
        workers = [cluster.worker(f"w{number}", MODEL) for number in range(1 + others)]
        cluster.wait_ready(frontend, *workers)
        if wire == "native":  # a worker that does not offer `mux`
            rewrite(cluster.root, mux=None)
            await until(lambda: b'"mux"' not in frontend.get("/health")[1])
        limit = floor if others else 6 * floor
        gaps: list[float] = []
        lost = doubled = hung = 0
        for index in range(5, 55, 5):
            tag = f"{wire}-{others}-{index}"
            stopped: list[tuple[Worker, float]] = []

            def stop(answer: Answer, tag: str = tag, index: int = index, stopped: Any = stopped) -> None:
                if len(answer.text) >= index and not stopped:
                    victim = who_has(workers, tag)
                    victim.signal(signal.SIGSTOP)
                    stopped.append((victim, time.monotonic()))

            try:
                answer = await stream(
                    frontend.port, [["say", ANSWER, 0.02]], tag=tag, patience=limit + 30.0, on_token=stop
                )
            except TimeoutError:
                hung += 1
                continue
            finally:
                ended = time.monotonic()
                for victim, _ in stopped:
                    victim.signal(signal.SIGCONT)
            assert stopped, answer
            ((victim, at),) = stopped
            if others:
                gaps.append(answer.gaps[-1])
                lost += len(set(ANSWER) - set(answer.text))
                doubled += len(answer.text) - len(set(answer.text))
            else:
                gaps.append(ended - at)
                assert answer.error is not None, answer
                assert answer.error["code"] == 504
            await victim.sees("finally", tag)  # it hears of the cancellation once it wakes
            # The next stream must be able to choose either worker again.
            async with asyncio.timeout(90):
                while metric(frontend, "dynamo_request_plane_quarantined_instances"):
                    assert (await ask(frontend.port, CHAT, chat(MODEL))).status == 200
                    await asyncio.sleep(0.2)
        note = (
            f"from the last token to the next; floor {floor:g} s"
            if others
            else f"until the typed error; floor {floor:g} s"
        )
        record(
            f"R4 SIGSTOP mid-stream, {wire}, {'another worker' if others else 'nobody else'}",
            sent=10, lost=lost, doubled=doubled, hung=hung, recovery_ms=[1e3 * gap for gap in gaps], note=note,
        )  # fmt: skip
        assert (lost, doubled, hung) == (0, 0, 0)
        assert max(gaps) < limit + SLACK_SECONDS


@pytest.mark.parametrize("kind", ["cut", "silent", "one way"])
async def test_a_partition_between_frontend_and_worker(tmp_path: Path, kind: str) -> None:
    """R8. One of two workers is behind a relay. Its requests go elsewhere, and a probe finds out that it is back."""
    env = {"DYN_STALL_FLOOR_SECS": str(FLOOR_SECONDS), "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0.5"}
    with Cluster(tmp_path, **env) as cluster:
        async with AsyncExitStack() as stack:
            frontend = cluster.frontend("frontend")
            far = cluster.worker("far", MODEL)
            cluster.wait_ready(frontend, far)
            relay = await stack.enter_async_context(Relay(rewrite(cluster.root)))
            rewrite(cluster.root, port=relay.port)
            await until(lambda: f":{relay.port}/".encode() in frontend.get("/health")[1])
            near = cluster.worker("near", MODEL)
            cluster.wait_ready(frontend, far, near)
            for _ in range(8):  # in turn, so both are asked
                assert (await ask(frontend.port, CHAT, chat(MODEL))).status == 200
            assert relay.connections >= 1
            running = [
                asyncio.create_task(
                    stream(frontend.port, [["say", ANSWER, 0.1]], tag=f"{kind}-{number}", patience=90.0)
                )
                for number in range(6)
            ]
            await until(lambda: any(far.count("first", f"{kind}-{number}") for number in range(6)))
            await asyncio.sleep(1.0)
            match kind:
                case "cut":
                    await relay.cut()
                case "silent":
                    relay.silence()
                case _:
                    relay.silence_back()
            await until(lambda: metric(frontend, "dynamo_request_plane_quarantines_total") >= 1)
            answers = await asyncio.gather(*running, return_exceptions=True)
            during = [
                await ask(frontend.port, CHAT, chat(MODEL), headers=script(["say", "x"], tag="during"))
                for _ in range(10)
            ]
            if kind == "cut":
                await relay.restore()
            relay.speak()
            healed = time.monotonic()
            reached = 0.0
            while not reached and time.monotonic() < healed + 60.0:
                tag = f"after-{time.monotonic()}"
                assert (
                    await ask(frontend.port, CHAT, chat(MODEL), headers=script(["say", "x"], tag=tag))
                ).status == 200
                if far.count("generate", tag) and not metric(frontend, "dynamo_request_plane_quarantined_instances"):
                    reached = time.monotonic()
                await asyncio.sleep(0.05)
            whole = [isinstance(one, Answer) and one.text == ANSWER for one in answers]
            record(
                f"R8 partition, {kind}",
                sent=len(answers) + len(during), lost=whole.count(False) + sum(one.status != 200 for one in during),
                hung=sum(isinstance(one, TimeoutError) for one in answers),
                recovery_ms=[1e3 * (reached - healed)] if reached else [],
                note="from the end of the partition to the first request there",
            )  # fmt: skip
            assert all(whole), answers
            assert [one.status for one in during] == [200] * len(during)
            assert reached
            assert metric(frontend, "dynamo_request_plane_probes_total") >= 1


async def test_a_storm_of_bad_requests_is_the_business_of_its_client_only(tmp_path: Path) -> None:
    """R9. Half of the bad ones are declined here, half by the engine; quiet and storm in turns."""
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend")
        workers = [cluster.worker(f"w{number}", MODEL) for number in range(2)]
        cluster.wait_ready(frontend, *workers)
        stop = asyncio.Event()
        statuses: list[int] = []
        bad_body = chat(MODEL, temperature=-7)
        refused = script(["raise", "InvalidArgument", "no"], tag="storm")
        asserted = script(["raise", 422, "no"], tag="storm")

        async def storm() -> None:
            kinds = [(bad_body, {}), (chat(MODEL), refused), (chat(MODEL), asserted)]
            while not stop.is_set():
                for body, headers in kinds:
                    statuses.append((await ask(frontend.port, CHAT, body, headers=headers)).status)
                await asyncio.sleep(0.002)

        async def good(count: int) -> list[float]:
            took = []
            for number in range(count):
                began = time.monotonic()
                reply = await ask(
                    frontend.port, CHAT, chat(MODEL), headers=script(["say", "hello"], tag=f"good-{number}")
                )
                took.append(time.monotonic() - began)
                assert reply.text == "hello"
            return took

        await good(20)
        quiet: list[list[float]] = []
        loud: list[list[float]] = []
        for _ in range(6):
            quiet.append(await good(60))
            stop.clear()
            storms = [asyncio.create_task(storm()) for _ in range(2)]
            loud.append(await good(60))
            stop.set()
            await asyncio.gather(*storms)
        p99 = [statistics.median(sorted(one)[int(0.99 * len(one)) - 1] for one in phase) for phase in (quiet, loud)]
        record(
            "R9 a storm of 4xx from one client",
            sent=720, note=f"{len(statuses)} bad requests; p99 of the others {1e3 * p99[0]:.0f} ms quiet, {1e3 * p99[1]:.0f} ms in the storm",
        )  # fmt: skip
        assert len(statuses) > 300
        assert all(400 <= status < 500 for status in statuses)
        assert metric(frontend, "dynamo_request_plane_quarantines_total") == 0
        assert min(sum(worker.count("generate", f"good-{number}") for number in range(60)) for worker in workers) > 100
        # The storm shares two processors with everybody here, so only a different order of magnitude says anything.
        assert p99[1] < 5 * p99[0] + 0.25


@dataclass
class Load:
    """What the mixed load did; one for the whole run."""

    port: int
    ends_at: float
    rng: random.Random
    sent: int = 0
    hung: int = 0
    wrong: list[str] = field(default_factory=list)

    def plan(self, kind: str) -> tuple[list[Any], str, dict[str, Any]]:
        """A script, what it says, and more members of the body."""
        rng = self.rng
        text = "".join(rng.choices(ANSWER, k=rng.randint(60, 600)))
        match kind:
            case "fast":
                return [["say", text * 3, 0.001]], text * 3, {}
            case "slow":
                return [["say", text[:12], rng.uniform(1.0, 3.0)]], text[:12], {}
            case "burst":
                steps = [part for _ in range(6) for part in (["say", text[:40]], ["say", "-", 1.0])]
                return steps, (text[:40] + "-") * 6, {}
            case "pausing":  # below the floor, so always allowed
                steps = [["say", text[:40], 0.02], ["say", "-", 6.0], ["say", text[40:60], 0.02]]
                return steps, text[:40] + "-" + text[40:60], {}
            case "long prompt":
                body = {"messages": [{"role": "user", "content": "word " * 1500}]}
                return [["say", text[0], 15.0], ["say", text[1:50], 0.02]], text[:50], body
            case _:
                return [["say", text, rng.uniform(0.01, 0.05)]], text, {}

    async def client(self) -> None:
        kinds = ["fast", "usual", "usual", "slow", "burst", "pausing", "long prompt", "unary", "several"]
        while time.monotonic() < self.ends_at:
            kind = self.rng.choice(kinds)
            steps, text, more = self.plan(kind)
            self.sent += 1
            tag = f"{kind}-{self.sent}"
            n = 3 if kind == "several" else 1
            try:
                if kind in ("unary", "several"):
                    said = await unary(self.port, steps, tag=tag, patience=300.0, n=n)
                else:
                    answer = await stream(self.port, steps, tag=tag, patience=300.0, **more)
                    said = [answer.text]
            except TimeoutError:
                self.hung += 1
                continue
            if said != [text] * n:
                self.wrong.append(tag)


async def unary(port: int, steps: Iterable[Any], *, tag: str, patience: float, n: int) -> list[str]:
    """What the choices of a whole answer say."""
    async with (
        asyncio.timeout(patience),
        exchange(port, CHAT, chat(MODEL, n=n), headers=script(*steps, tag=tag)) as one,
    ):
        body = (await one.reader.read()).partition(b"\r\n\r\n")[2]
    return [choice["message"]["content"] for choice in json.loads(body).get("choices", ())]


def moved_without_need(workers: list[Worker], stops: list[tuple[str, float, float]]) -> list[str]:
    """The requests that several workers served, but for victims and for those whose worker was stopped meanwhile."""
    served: dict[str, list[dict[str, Any]]] = {}
    for event in sorted((event for worker in workers for event in worker.events()), key=lambda one: float(one["at"])):
        if event["event"] == "generate" and not event["tag"].startswith("victim"):
            served.setdefault(event["id"], []).append(event)

    def was_stopped(event: dict[str, Any], earlier: float, later: float) -> bool:
        return any(name == event["worker"] and begin <= later and earlier <= end for name, begin, end in stops)

    return [
        f"{second['tag']}: at {first['worker']} at {first['at']:.1f}, at {second['worker']} at {second['at']:.1f}; {stops}"
        for turns in served.values()
        for first, second in itertools.pairwise(turns)
        # A request that was sent to a stopped worker and moved away is begun there, too, for a moment, once it wakes.
        if not any(was_stopped(one, first["at"], second["at"]) for one in (first, second))
    ]


async def test_stalls_on_purpose_are_found_and_nothing_else_is(tmp_path: Path) -> None:
    """A mixed load for `STALL_MINUTES`, with the default limits; every minute a stream gets stuck or an engine is stopped."""
    floor, factor, beat = 10.0, 20.0, 0.5
    with Cluster(tmp_path, DYN_MIGRATION_LIMIT="20") as cluster:
        frontend = cluster.frontend("frontend")
        workers = [cluster.worker(f"w{number}", MODEL) for number in range(3)]
        cluster.wait_ready(frontend, *workers)
        load = Load(frontend.port, time.monotonic() + 60.0 * STALL_MINUTES, random.Random(20261120))
        stops: list[tuple[str, float, float]] = []
        found: list[float] = []
        late: list[str] = []
        lost = doubled = 0

        async def vandal() -> None:
            nonlocal lost, doubled
            while not found or time.monotonic() < load.ends_at - 50.0:
                tag = f"victim-{len(found)}"
                is_stop = len(found) % 2 == 1
                hit: list[Worker] = []

                def stop(answer: Answer, tag: str = tag, hit: list[Worker] = hit) -> None:
                    if len(answer.text) >= 40 and not hit:
                        hit.append(who_has(workers, tag))
                        hit[0].signal(signal.SIGSTOP)

                steps = [["say", ANSWER[:40], 0.03], *([] if is_stop else [["stick"]]), ["say", ANSWER[40:], 0.03]]
                began = time.monotonic()
                try:
                    answer = await stream(
                        frontend.port, steps, tag=tag, patience=300.0, on_token=stop if is_stop else None
                    )
                finally:
                    for worker in hit:
                        worker.signal(signal.SIGCONT)
                        stops.append((worker.name, began, time.monotonic() + 1.0))
                lost += len(set(ANSWER) - set(answer.text))
                doubled += len(answer.text) - len(set(answer.text))
                found.append(answer.gaps[-1])
                usual = max(answer.at[0] - began, *answer.gaps[-2:-1])  # what its limit was made of
                limit = 3 * max(floor, factor * (usual + beat))  # three times: others went on, or a prompt was there
                if answer.gaps[-1] > limit + SLACK_SECONDS + 2 * beat:
                    late.append(f"{tag}: {answer.gaps[-1]:.1f} s, {limit:.1f} s were allowed")
                await asyncio.sleep(20.0 if is_stop else 5.0)

        await asyncio.gather(vandal(), *(load.client() for _ in range(8)))
        innocent = moved_without_need(workers, stops)
        record(
            f"stalls among {STALL_MINUTES:g} minutes of mixed load",
            sent=load.sent + len(found),
            lost=lost + len(load.wrong),
            doubled=doubled,
            hung=load.hung,
            recovery_ms=[1e3 * gap for gap in found],
            note=f"{len(found)} stalls on purpose, default limits; {len(innocent)} other requests moved",
        )
        assert (lost, doubled, load.hung, load.wrong) == (0, 0, 0, [])
        assert late == []
        assert innocent == []
