"""The rows of the table: what is run, what is read from it, and the bar. One call of a case is one fresh start."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ladder
import uvloop
from model import Prompts
from stack import HERE, Stack, floor, stack

from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.load import Load
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.targets import Target

PATH = "/v1/chat/completions"
PACE_SECONDS = 0.02
SETTLE_SECONDS = 2.0
CAPACITY_LATENCY_MS = 30.0
CAPACITY_TOKENS = (
    250  # five seconds, so that the first tokens, which come with the prompts, are less than 1 % of the gaps
)
MOST_STREAMS = 8192
LADDER = {
    "HTTP": 14,
    "decode": 3,
    "checks": 8,
    "template": 14,
    "tokeniser": 20,
    "plan": 14,
    "choice": 14,
    "open": 16,
    "first event": 22,
    "answer": 35,
    "end": 55,
    "loop": 60,
    "other": 25,
}
Figures = dict[str, float]


@dataclass(frozen=True)
class Bar:
    """One figure of a case and what it must not exceed. None: told, not judged."""

    figure: str
    unit: str
    limit: float | None = None
    beside: tuple[str, ...] = ()  # figures told in the same line


@dataclass(frozen=True)
class Case:
    """One row, or a few that come from the same run."""

    name: str
    run: Callable[[Bench], Figures]
    bars: tuple[Bar, ...]


@dataclass
class Bench:
    """What every case needs; made once."""

    model: Path
    is_quick: bool
    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.model)
        self._seeds = itertools.count(1000)  # no prompt is asked twice in one run of the table

    def bodies(self, count: int, tokens: int, **members: Any) -> list[dict[str, Any]]:
        """Chat requests with prompts of 64 tokens, all different."""
        return [chat(self.prompts.text(64, next(self._seeds)), tokens, **members) for _ in range(count)]

    def seed(self) -> int:
        """A fresh one."""
        return next(self._seeds)


def chat(text: str, tokens: int, **members: Any) -> dict[str, Any]:
    """One request."""
    return {"model": "bench", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **members}


def streaming(**members: Any) -> dict[str, Any]:
    """Members of a streamed request."""
    return {"stream": True, "stream_options": {"include_usage": True}, **members}


def prepared(port: int, bodies: list[dict[str, Any]]) -> list[Prepared]:
    """Requests as bytes, so that making them is not part of the window."""
    target = Target.of(f"http://127.0.0.1:{port}")
    return [Prepared(target.post(PATH, body), bool(body.get("stream"))) for body in bodies]


async def load(port: int, requests: list[Prepared], connections: int) -> Recorder:
    """Send each once, closed loop."""
    recorder = Recorder()
    shape = Shape(connections, requests=len(requests), timeout_seconds=120)
    target = Target.of(f"http://127.0.0.1:{port}")
    await Load([target], lambda number, index: requests[number], shape, recorder).run()
    return recorder


def driven(main: Any) -> Any:
    """Run a coroutine on the loop that costs least."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def spent(running: Stack, before: Mapping[str, float], units: int) -> Figures:
    """Microseconds of CPU per unit, by process."""
    return {f"{name} us": 1e6 * (after - before[name]) / units for name, after in running.cpu().items()}


def measured_load(running: Stack, requests: list[Prepared], connections: int, *, per_request: bool = False) -> Figures:
    """CPU of every process over one load, and what the load saw."""
    before, own = running.cpu(), time.process_time()
    recorder: Recorder = driven(load(running.port, requests, connections))
    own = time.process_time() - own
    units = max(recorder.answered if per_request else recorder.output_tokens, 1)
    return spent(running, before, units) | {
        "load generator us": 1e6 * own / units,
        "load generator share": own / recorder.seconds,
        "tokens/s": recorder.output_tokens / recorder.seconds,
        "requests/s": recorder.answered / recorder.seconds,
        "first token p50 ms": 1e3 * recorder.first_token.quantile(0.5),
        "itl p99 ms": 1e3 * recorder.gap.quantile(0.99),
        "events per token": recorder.text_events / max(recorder.output_tokens, 1),
        "failed": recorder.failed,
    }


def warm(bench: Bench, running: Stack, connections: int, **members: Any) -> None:
    """Every path and every connection's code once."""
    driven(load(running.port, prepared(running.port, bench.bodies(2 * connections, 8, **members)), connections))


def streams(
    delay: float, connections: int, requests: int, tokens: int, *, has_tls: bool = False, **extra: Any
) -> Callable[[Bench], Figures]:
    """`requests` streamed answers of `tokens` tokens, so many at a time; `has_tls`: between frontend and worker."""

    def run(bench: Bench) -> Figures:
        members = streaming(**extra)
        with stack(bench.model, delay, has_tls=has_tls) as running:
            warm(bench, running, connections, **members)
            requests_ = prepared(running.port, bench.bodies(requests, tokens, **members))
            figures = measured_load(running, requests_, connections)
            return figures | {f"{name} MB": value for name, value in running.rss().items()}

    return run


def stepped(connections: int, requests: int, tokens: int) -> Callable[[Bench], Figures]:
    """Streams whose tokens come all at the same moment, once every 20 ms; beside them, in the same minute, the floors."""

    def run(bench: Bench) -> Figures:
        floor_figures = bare_server("step", connections, requests)(bench)
        members = streaming()
        with stack(bench.model, 0, step=PACE_SECONDS) as running:
            warm(bench, running, connections, **members)
            figures = measured_load(
                running, prepared(running.port, bench.bodies(requests, tokens, **members)), connections
            )
        return figures | {
            "floor us": floor_figures["floor us"],
            "frontend / floor": figures["frontend us"] / floor_figures["floor us"],
            "wake floor us": bare_engine(connections, "wake")(bench)["floor us"],
        }

    return run


def capacity(bench: Bench) -> Figures:
    """The most streams at 20 ms per token, in steps of a quarter, whose p99 inter-token latency stays within 30 ms."""
    carried = {"streams": 0.0, "itl p99 ms": 0.0}
    with stack(bench.model, 0, step=PACE_SECONDS) as running:
        warm(bench, running, 64, **streaming())
        count = 256
        while count <= MOST_STREAMS:
            bodies = bench.bodies(count, CAPACITY_TOKENS, **streaming())
            recorder: Recorder = driven(load(running.port, prepared(running.port, bodies), count))
            latency = 1e3 * recorder.gap.quantile(0.99)
            if recorder.failed or latency > CAPACITY_LATENCY_MS:
                break
            carried = {"streams": float(count), "itl p99 ms": latency}
            count = count * 5 // 4
    return carried


def unary(bench: Bench) -> Figures:
    """One-token requests, 64 at a time, not streamed."""
    with stack(bench.model, 0) as running:
        warm(bench, running, 64)
        return measured_load(running, prepared(running.port, bench.bodies(6000, 1)), 64, per_request=True)


def one_ladder(bench: Bench, mode: str) -> Figures:
    """What each stay of a one-token request costs the frontend; `mode`: of its router."""
    count = 1500 if bench.is_quick else 6000
    flags = ["--router-mode", mode]

    def load_once(running: Stack) -> Figures:
        requests = prepared(running.port, bench.bodies(count, 1))
        return measured_load(running, requests, 64, per_request=True)

    with stack(bench.model, 0, frontend=flags) as running:
        warm(bench, running, 64)
        plain = load_once(running)
    with tempfile.TemporaryDirectory() as name, ladder.sampling(Path(name)) as result:
        with stack(bench.model, 0, frontend=flags) as running:
            warm(bench, running, 64)
            ladder.toggle(running, Path(f"{result}.on"))
            sampled = load_once(running)
            ladder.toggle(running, result)
        shares = ladder.read(result)
    whole = sampled["frontend us"]
    return {
        "all": whole,
        "without sampler": plain["frontend us"],
        "failed": plain["failed"] + sampled["failed"],
        **{stay: share * whole for stay, share in shares.items()},
        **{f"{stay} %": 100 * share for stay, share in shares.items()},
    }


def both_ladders(bench: Bench) -> Figures:
    """The ladder with the default choice of a worker, and with KV routing."""
    found = one_ladder(bench, "round-robin")
    by_kv = one_ladder(bench, "kv")
    return (
        found | {f"{name}, kv": value for name, value in by_kv.items()} | {"failed": found["failed"] + by_kv["failed"]}
    )


def rungs() -> tuple[Bar, ...]:
    """A bar for each stay; together they are the 300 us of a request."""
    stays = [Bar(stay, "us/request", LADDER[stay], (f"{stay} %", f"{stay}, kv")) for stay in LADDER]
    return (
        *stays,
        Bar("all", "us/request", sum(LADDER.values()), ("all, kv",)),
        Bar("without sampler", "us/request", None, ("without sampler, kv",)),
        Bar("other %", "% of all", 10, ("other %, kv",)),
    )


def long_prompts(bench: Bench) -> Figures:
    """A 32,000-token prompt; the same again; one that shares its first 30,000 tokens. The yardstick is tokenising the same
    texts once in this process, between the requests."""
    kinds: dict[str, list[float]] = {}
    with stack(bench.model, 0) as running:

        def ask(kind: str, text: str) -> None:
            (request,) = prepared(running.port, [chat(text, 1)])
            before = running.cpu()
            recorder: Recorder = driven(load(running.port, [request], 1))
            after = running.cpu()
            if recorder.failed:
                raise RuntimeError(f"a long prompt failed: {recorder.failures}")
            for name in after:
                kinds.setdefault(f"{name} {kind}", []).append(1e3 * (after[name] - before[name]))

        for turn in range(3 if bench.is_quick else 6):
            first, sharing = bench.prompts.pair(32_000, 30_000, seed=bench.seed())
            begun = time.process_time()
            bench.prompts.tokenizer.encode_batch_fast([first], add_special_tokens=False)
            kinds.setdefault("tokenise", []).append(1e3 * (time.process_time() - begun))
            ask("first", first)
            ask("again", first)
            ask("sharing", sharing)
            if turn == 0:
                kinds.clear()  # that was the warm-up
    middle = {kind: statistics.median(values) for kind, values in kinds.items()}
    return {
        "first / tokenising": middle["frontend first"] / middle["tokenise"],
        "again ms": middle["frontend again"],
        "sharing ms": middle["frontend sharing"],
        "worker ms": max(middle[f"worker {kind}"] for kind in ("first", "again", "sharing")),
        "first ms": middle["frontend first"],
        "tokenise ms": middle["tokenise"],
    }


def beside_long_prompts(bench: Bench) -> Figures:
    """64 paced streams alone, then the same with eight 32,000-token prompts sent at one moment in their middle."""
    with stack(bench.model, PACE_SECONDS) as running:
        warm(bench, running, 64, **streaming())

        async def both(with_long: bool) -> Recorder:
            requests = prepared(running.port, bench.bodies(64, 128, **streaming()))
            long = prepared(running.port, [chat(bench.prompts.text(32_000, bench.seed()), 1) for _ in range(8)])
            paced = asyncio.create_task(load(running.port, requests, 64))  # awaited below
            await asyncio.sleep(1.0)
            if with_long:
                beside = await load(running.port, long, 8)
                if beside.failed:
                    raise RuntimeError(f"a long prompt failed: {beside.failures}")
            return await paced

        pairs: list[tuple[Recorder, Recorder]] = [
            (driven(both(False)), driven(both(True))) for _ in range(1 if bench.is_quick else 3)
        ]
    before, after = ([1e3 * pair[at].gap.quantile(0.99) for pair in pairs] for at in (0, 1))
    return {
        "p99 ITL rise ms": statistics.median(b - a for a, b in zip(before, after, strict=True)),
        "p99 ITL alone ms": statistics.median(before),
        "p99 ITL beside ms": statistics.median(after),
        "worst ITL beside ms": 1e3 * max(pair[1].gap.highest for pair in pairs),
        "failed": sum(recorder.failed for pair in pairs for recorder in pair),
    }


def quiet(bench: Bench) -> Figures:
    """Start, rest, and one stream at a time on a kept-alive connection."""
    seconds = 4.0 if bench.is_quick else 10.0
    with stack(bench.model, 0) as running:
        time.sleep(SETTLE_SECONDS)
        idle_rss, before = running.rss(), running.cpu()
        time.sleep(seconds)
        idle = {name: 100 * (after - before[name]) / seconds for name, after in running.cpu().items()}
        driven(load(running.port, prepared(running.port, bench.bodies(20, 1, **streaming())), 1))
        recorder: Recorder = driven(load(running.port, prepared(running.port, bench.bodies(300, 1, **streaming())), 1))
        return {
            "first token p50 ms": 1e3 * recorder.first_token.quantile(0.5),
            "first token p99 ms": 1e3 * recorder.first_token.quantile(0.99),
            "start to first answer s": running.seconds_to_first_answer,
            **{f"{name} idle MB": value for name, value in idle_rss.items()},
            **{f"{name} idle %": value for name, value in idle.items()},
            "failed": recorder.failed,
        }


def bare_server(what: str, connections: int, requests: int) -> Callable[[Bench], Figures]:
    """What the machine charges anyone: see `floor.py`."""

    def run(bench: Bench) -> Figures:
        with floor(what, PACE_SECONDS) as running:
            warm(bench, running, connections, **streaming())
            return measured_load(
                running, prepared(running.port, bench.bodies(requests, 128, **streaming())), connections
            )

    return run


def bare_engine(connections: int, what: str = "sleep") -> Callable[[Bench], Figures]:
    """What so many generators cost without anything of ours around them; `what`: see `floor.py`."""

    def run(bench: Bench) -> Figures:
        command = [sys.executable, str(HERE / "floor.py"), "--what", what, "--streams", str(connections)]
        return {"floor us": float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)}

    return run


def per_token(frontend: float, worker: float, unit: str = "us/token") -> tuple[Bar, ...]:
    """The two bars of most rows, and what it cost to ask."""
    return Bar("frontend us", unit, frontend), Bar("worker us", unit, worker), Bar("load generator us", unit)


FLOOR = (Bar("floor us", "us/event"),)


def cases() -> Iterator[Case]:
    """The table of the issue, in its order; the floor first."""
    for count in (64, 256):
        sent = 2 * count
        yield Case(f"floor: bare uvicorn, paced, {count} streams", bare_server("uvicorn", count, sent), FLOOR)
        yield Case(f"floor: one write per event, {count} streams", bare_server("write", count, sent), FLOOR)
        yield Case(f"floor: one sleep per token, {count} streams", bare_engine(count), FLOOR)
    yield Case("burst, 64 streams, 256 tokens", streams(0, 64, 640, 256), per_token(4.0, 2.5))
    yield Case("burst, 256 streams, 256 tokens", streams(0, 256, 1024, 256), per_token(5.0, 3.2))
    yield Case("paced, 64 streams, 128 tokens", streams(PACE_SECONDS, 64, 192, 128), per_token(18, 10))
    yield Case(
        "paced, 256 streams, 128 tokens",
        streams(PACE_SECONDS, 256, 512, 128),
        (*per_token(15, 7), Bar("frontend MB", "MB after", 130), Bar("worker MB", "MB after", 75)),
    )
    yield Case(
        "paced, 64 streams, stop strings + logprobs",
        streams(PACE_SECONDS, 64, 128, 128, stop=["zzqqzz", "\n\n\n\n"], logprobs=True),
        per_token(22, 12),
    )
    for count, sent in ((64, 192), (256, 512), (1024, 1024)):
        yield Case(
            f"stepped, {count} streams, 128 tokens",
            stepped(count, sent, 128),
            (
                Bar("floor us", "us/event"),
                Bar("frontend us", "us/token"),
                Bar("frontend / floor", "x", 1.6),
                Bar("wake floor us", "us/token"),
                Bar("worker us", "us/token", 4.0),
            ),
        )
    yield Case(
        "capacity: streams at 20 ms per token, p99 <= 30 ms", capacity, (Bar("streams", ""), Bar("itl p99 ms", "ms"))
    )
    for name, delay, requests, tokens in (("burst", 0.0, 640, 256), ("paced", PACE_SECONDS, 192, 128)):
        yield Case(
            f"{name}, 64 streams, {tokens} tokens, TLS on mux",
            streams(delay, 64, requests, tokens, has_tls=True),
            (Bar("frontend us", "us/token"), Bar("worker us", "us/token")),
        )
    yield Case("one-token requests, 64 at a time, unary", unary, per_token(300, 80, "us/request"))
    yield Case("ladder: requests of one token, 64 at a time", both_ladders, rungs())
    yield Case(
        "a 32,000-token prompt",
        long_prompts,
        (
            Bar("first / tokenising", "x", 1.1),
            Bar("again ms", "ms", 1.5),
            Bar("sharing ms", "ms", 5),
            Bar("worker ms", "ms", 2),
        ),
    )
    yield Case("eight 32,000-token prompts, 64 paced streams", beside_long_prompts, (Bar("p99 ITL rise ms", "ms", 10),))
    yield Case(
        "quiet: start, rest, one stream",
        quiet,
        (
            Bar("first token p50 ms", "ms", 1.5),
            Bar("start to first answer s", "s", 1.2),
            Bar("frontend idle MB", "MB", 90),
            Bar("worker idle MB", "MB", 60),
            Bar("frontend idle %", "%", 0.3),
            Bar("worker idle %", "%", 0.3),
        ),
    )
