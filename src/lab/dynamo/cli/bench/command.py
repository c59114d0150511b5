"""`dynamo bench`: read the command line, query the server's models, load it, report."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from dynamo.cli.bench.connections import ClientConnection, Prepared, SentRequest
from dynamo.cli.bench.load import Load, RequestSource
from dynamo.cli.bench.options import BenchOptions, read_options
from dynamo.cli.bench.prompts import Prompt, WordCost, words
from dynamo.cli.bench.results import Results, results_of
from dynamo.cli.bench.samples import Recorder
from dynamo.cli.bench.schedule import Shape
from dynamo.cli.bench.table import failure_rows, figure_rows, latency_rows, remarks
from dynamo.cli.bench.targets import ENDPOINT_PATHS, Target
from dynamo.cli.console import Console
from dynamo.cli.usage import UsageError

# The line that lives while a load runs; only on a terminal.


EVERY_SECONDS: Final = 0.5
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """Shows `load` on `stream` inside a `with` block."""

    def __init__(self, load: Load, shape: Shape, stream: TextIO) -> None:
        self._load, self._shape, self._stream = load, shape, stream
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._timer = self._loop.call_later(EVERY_SECONDS, self._show)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._write(_CLEAR)

    def _show(self) -> None:
        text = progress_text(self._load.recorder, self._shape, self._load.elapsed, self._load.in_flight)
        self._write(_CLEAR + text)
        self._timer = self._loop.call_later(EVERY_SECONDS, self._show)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone; the run has not
            self._timer = None


def progress_text(recorder: Recorder, shape: Shape, elapsed: float, in_flight: int) -> str:
    """Format the progress as one line of at most about 100 characters."""
    elapsed = max(elapsed, 1e-9)
    total = f"/{shape.requests:,}" if shape.requests else ""
    time = f"{elapsed:.0f}/{shape.seconds:g} s" if shape.seconds else f"{elapsed:.0f} s"
    line = (
        f"{time}  {recorder.answered:,}{total} answered  {in_flight:,} in flight  "
        f"{recorder.answered / elapsed:,.1f} req/s  {max(recorder.output_tokens, recorder.text_events) / elapsed:,.0f} tokens/s"
    )
    if recorder.first_token.count:
        line += f"  TTFT {1e3 * recorder.first_token.quantile(0.5):.0f} ms"
    return line + (f"  {recorder.failed:,} failed" if recorder.failed else "")


EXIT_ALL_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
PROBE_SECONDS: Final = 60.0
PROBE_WORDS: Final = (4, 100)  # a short and a longer prompt, within the context of any model
WARMUP_CONNECTIONS: Final = 16


class ServerTrouble(Exception):
    """The server's models cannot be queried."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    recorder: Recorder
    cpu_seconds: float
    was_interrupted: bool


def main(argv: list[str]) -> int:
    """Run the load; the exit status."""
    if argv[:1] == ["replay"]:
        from dynamo.cli.bench.replay.command import main as replay

        return replay(argv[1:])
    options = read_options(argv)
    console = Console()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            outcome, options = runner.run(_bench(options, console))
        except ServerTrouble as trouble:
            console.complain(f"dynamo bench: {trouble}")
            return EXIT_ALL_FAILED
    results = results_of(outcome.recorder, options.settings, outcome.cpu_seconds, outcome.was_interrupted)
    _show(results, console)
    _write(options, results, outcome.recorder, console)
    if outcome.was_interrupted:
        return EXIT_INTERRUPTED
    return 0 if outcome.recorder.answered else EXIT_ALL_FAILED


def _loop_factory() -> Any:
    """Choose uvloop's loop factory where uvloop is installed: it halves what this process costs."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _bench(options: BenchOptions, console: Console) -> tuple[_Outcome, BenchOptions]:
    if not options.models:
        name = await first_model(options.targets[0])
        options = replace(options, models=(name,), settings={**options.settings, "model": [name]})
    costs = {name: WordCost() for name in options.models}
    if options.are_prompts_generated:
        costs = {name: await _word_cost(options, name) for name in options.models}
    rng = random.Random(options.seed)
    source = request_source(options, costs, rng)
    if options.warmup:
        shape = Shape(min(options.warmup, options.shape.connections, WARMUP_CONNECTIONS), requests=options.warmup)
        if options.shape.rate is None:  # open every connection that the run will have
            shape = replace(shape, connections=min(options.warmup, options.shape.connections))
        await Load(options.targets, source, replace(shape, timeout_seconds=PROBE_SECONDS), Recorder()).run()
    return await _measured(options, source, rng), options


async def _measured(options: BenchOptions, source: RequestSource, rng: random.Random) -> _Outcome:
    recorder = Recorder()
    load = Load(options.targets, source, options.shape, recorder, rng=rng)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        load.stop()

    cpu = time.process_time()
    with _on_interrupt(interrupt), Progress(load, options.shape, sys.stderr):
        await load.run()
    return _Outcome(recorder, time.process_time() - cpu, interrupted)


@contextmanager
def _on_interrupt(call: Any) -> Iterator[None]:
    """Let the first Ctrl-C run `call`; Python handles the next Ctrl-C."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loop.call_soon_threadsafe(call)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def request_source(options: BenchOptions, costs: dict[str, WordCost], rng: random.Random) -> RequestSource:
    """Requests, made when they are due. Models take turns first, then endpoints."""
    models, endpoints, extra = options.models, options.endpoints, dict(options.extra_body)
    if options.is_stream:
        extra = {"stream": True, "stream_options": {"include_usage": True}, **extra}
    is_stream = bool(extra.get("stream"))

    def source(number: int, target: int) -> Prepared:
        model = models[number % len(models)]
        endpoint = endpoints[number // len(models) % len(endpoints)]
        prompt = options.prompts.draw(number, rng, costs[model])
        body = {
            "model": model,
            **members_for(endpoint, prompt),
            "max_tokens": prompt.output_tokens or options.output.draw(rng),
            **extra,
        }
        return Prepared(options.targets[target].post(ENDPOINT_PATHS[endpoint], body), is_stream)

    return source


def members_for(endpoint: str, prompt: Prompt) -> dict[str, Any]:
    """Return the prompt, in the form of the endpoint."""
    members = dict(prompt.members)
    if endpoint == "chat" and "prompt" in members:
        return {"messages": [{"role": "user", "content": members["prompt"]}]}
    return members


# -- what the server reports about itself -------------------------------------------------------------------------------


async def ask(target: Target, data: bytes) -> Any:
    """Send one request of the benchmark itself and return its answer as JSON. Raises ServerTrouble."""
    try:
        return json.loads(await fetch(target, data))
    except ValueError:
        raise ServerTrouble(f"{target.url} does not answer with JSON; is it an OpenAI-compatible server?") from None


async def fetch(target: Target, data: bytes) -> bytes:
    """Send one request of the benchmark itself and return the body of its answer. Raises ServerTrouble."""
    said: list[bytes] = []

    class Kept(Load):
        def answered(self, connection: ClientConnection, job: SentRequest) -> None:
            said.append(bytes(job.body))
            super().answered(connection, job)

    recorder = Recorder()
    shape = Shape(1, requests=1, timeout_seconds=PROBE_SECONDS)
    await Kept([target], lambda number, index: Prepared(data, False), shape, recorder).run()
    if recorder.failures:
        kind, failure = next(iter(recorder.failures.items()))
        said_where = failure.example if target.url in failure.example else f"{target.url}: {failure.example}"
        raise ServerTrouble(f"{kind}: {said_where}")
    return said[0]


async def first_model(target: Target) -> str:
    """Return the first model that a server lists. Raises ServerTrouble."""
    listed = await ask(target, target.get("/v1/models"))
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list):
        raise ServerTrouble(f"{target.url}/v1/models lists no models; say --model")
    if not models:
        raise ServerTrouble(f"{target.url} serves no model yet; start a worker, or say --model")
    return str(models[0]["id"])


async def _word_cost(options: BenchOptions, model: str) -> WordCost:
    """Measure how many tokens this model makes of our words. Without a usable answer, assume one token per word."""
    rng, endpoint, target = random.Random(options.seed), options.endpoints[0], options.targets[0]
    counts = []
    for count in PROBE_WORDS:
        body = {"model": model, **members_for(endpoint, Prompt({"prompt": words(rng, count)})), "max_tokens": 1}
        try:
            answer = await ask(target, target.post(ENDPOINT_PATHS[endpoint], body))
            counts.append((count, int(answer["usage"]["prompt_tokens"])))
        except (ServerTrouble, KeyError, TypeError, ValueError):
            return WordCost()
    return WordCost.measured(*counts)


# -- the report ------------------------------------------------------------------------------------------------------


def _show(results: Results, console: Console) -> None:
    console.table(("figure", "value"), figure_rows(results))
    if latencies := latency_rows(results):
        console.say("")
        console.table(("milliseconds", "mean", "p50", "p90", "p99", "max", "samples"), latencies)
    if results["failures"]:
        console.say("")
        console.table(("failure", "count", "share", "for example"), failure_rows(results))
    for remark in remarks(results):
        console.say(f"\n{remark}", strong=True)


def _write(options: BenchOptions, results: Results, recorder: Recorder, console: Console) -> None:
    def write(path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        console.say(f"wrote {path}")

    if options.json_file is not None:
        write(options.json_file, json.dumps(results, indent=1) + "\n")
    if options.html_file is not None:
        from dynamo.cli.bench.html import html_report

        write(options.html_file, html_report(results, recorder))
