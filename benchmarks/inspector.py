"""What the inspector costs a frontend: with a viewer, without one, and at the end of each request.

    python benchmarks/inspector.py                          1,000 streams, each with a token every 50 s
    python benchmarks/inspector.py --delay 1                each with a token every second: every row changes in every patch
    python benchmarks/inspector.py --only requests          what a request costs without a viewer

A real frontend and the bench's worker run as processes of their own. The streams stay open, and windows without and with one
viewer (a watch of `fleet,workers,streams` with up to 1,000 rows, as `dynamo top` asks for) take turns; the figure is the
difference of the frontend's CPU time. The cost of an ended request is also measured in this process, without sockets: the
least of many rounds, which is what the work takes when nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "tests"))

from cases import chat
from model import Prompts, make_model
from request_calls import counted
from stack import HERE, Stack, stack

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.requests import RequestSeries
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.recent import RecentRequests
from dynamo.frontend.pipeline.exchange import Arrival, Exchange, Phase
from dynamo.frontend.pipeline.outcome import Outcome, Reached, TokensTaken
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.protocol.worker_request import PlannedRequest, StopFields
from dynamo.runtime.calls.request_plane.base import Instance
from dynamo.runtime.http.inspector_token import find_access
from dynamo.runtime.observe.metrics.registry import MetricsRegistry
from support.frontend_cluster import cluster

VIEWER_BAR: Final = 0.5  # percent of a core
ADD_BAR: Final = 1.5  # microseconds
VIEWS: Final = "fleet,workers,streams"
LIMIT: Final = 1000
SETTLE_SECONDS: Final = 2.0  # after a viewer came or went
PATIENCE_SECONDS: Final = 60.0  # for the first patch of a window
ROUNDS: Final = 60
PER_ROUND: Final = 1000
CALL_TOKENS: Final = (1, 65)  # of the answers whose calls are counted: their difference is what a token costs


# -- with a viewer -----------------------------------------------------------------------------------------------------


async def open_stream(port: int, body: bytes) -> asyncio.StreamReader:
    """Send a streamed request; return what its answer is read from once that has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"a stream was refused: {status!r}")
    while not (await reader.readline()).startswith(b"data:"):
        pass
    reader._writer = writer  # type: ignore[attr-defined]  # or the connection closes with it
    return reader


async def drain(reader: asyncio.StreamReader) -> None:
    """Read and drop."""
    while await reader.read(65536):
        pass


@dataclass
class Watch:
    """One viewer: the sizes of the patches it got."""

    patches: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    async def run(self, port: int, token: str, begun: asyncio.Event) -> None:
        """Watch until cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        with closing(writer):
            writer.write(
                f"GET /admin/v1/watch?views={VIEWS}&limit={LIMIT} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
                f"authorization: Bearer {token}\r\n\r\n".encode()
            )
            is_patch = False
            while line := await reader.readline():
                if line.startswith(b"event:"):
                    is_patch = b"patch" in line
                elif line.startswith(b"data:") and is_patch:
                    self.patches.append(len(line))
                    self.entries.append(line.count(b'"started_ms"'))
                    begun.set()


@dataclass
class Window:
    """What the frontend used in one window."""

    share: float  # of a core
    watch: Watch | None
    seconds: float


async def measure_window(running: Stack, seconds: float, token: str | None) -> Window:
    """Return what the frontend uses, with a viewer if there is a token."""
    watch, task = None, None
    if token is not None:
        watch, begun = Watch(), asyncio.Event()
        task = asyncio.create_task(watch.run(running.port, token, begun))
        await begun.wait()
    await asyncio.sleep(SETTLE_SECONDS)
    if watch is not None:
        watch.patches.clear()
        watch.entries.clear()
    before, at = running.cpu()["frontend"], time.monotonic()
    await asyncio.sleep(seconds)
    while watch is not None and not watch.patches and time.monotonic() < at + PATIENCE_SECONDS:
        await asyncio.sleep(0.05)  # on a busy machine the first one may come after the window
    lasted = time.monotonic() - at
    share = (running.cpu()["frontend"] - before) / lasted
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return Window(share, watch, lasted)


async def watched(running: Stack, bodies: Sequence[bytes], args: argparse.Namespace) -> list[tuple[Window, Window]]:
    """Open the streams, and return windows without and with a viewer, in turns."""
    access = find_access(running.port)
    if access is None:
        raise RuntimeError("the frontend left no token")
    readers = []
    for begin in range(0, len(bodies), 50):
        readers += await asyncio.gather(*(open_stream(running.port, body) for body in bodies[begin : begin + 50]))
    readers_ = [asyncio.create_task(drain(reader)) for reader in readers]
    await asyncio.sleep(SETTLE_SECONDS)
    found = []
    for turn in range(args.turns):
        pair = {}
        for has_viewer in (False, True) if turn % 2 == 0 else (True, False):
            pair[has_viewer] = await measure_window(running, args.seconds, access.token if has_viewer else None)
        found.append((pair[False], pair[True]))
        print(
            f"  turn {turn + 1}: {100 * pair[False].share:.2f} % without, {100 * pair[True].share:.2f} % with",
            flush=True,
        )
    ended = sum(task.done() for task in readers_)
    for task in readers_:
        task.cancel()
    if ended:
        raise RuntimeError(f"{ended} streams ended meanwhile: the figures mean nothing")
    return found


def report_viewer(args: argparse.Namespace, model: Path) -> bool:
    """Measure and print what a viewer costs; return whether that is within the bar."""
    prompts = Prompts(model)
    bodies = [json.dumps(chat(prompts.text(32, seed), 60_000, stream=True)).encode() for seed in range(args.streams)]
    with stack(model, args.delay, is_eager=True) as running:
        windows = asyncio.run(watched(running, bodies, args))
    shares = [100 * (with_viewer.share - without.share) for without, with_viewer in windows]
    watches = [one.watch for _, one in windows if one.watch is not None]
    patches = [size for watch in watches for size in watch.patches]
    entries = [count for watch in watches for count in watch.entries]
    if not patches:
        raise RuntimeError("the viewer got no patch")
    share = statistics.median(shares)
    rate = len(patches) / sum(one.seconds for _, one in windows)
    print(f"{args.streams} streams with a token every {args.delay:g} s, {args.turns} turns of {args.seconds:g} s:")
    print(
        f"  one viewer  {share:6.2f} % of a core  (bar {VIEWER_BAR}; {min(shares):.2f} to {max(shares):.2f})\n"
        f"  without it  {100 * statistics.median([one.share for one, _ in windows]):6.2f} %\n"
        f"  a patch     {10 * share / rate:6.2f} ms of CPU, {statistics.median(patches):,.0f} bytes, "
        f"{statistics.median(entries):.0f} entries; {rate:.2f} a second"
    )
    return share <= VIEWER_BAR


# -- without one -------------------------------------------------------------------------------------------------------


def ended_exchange(number: int) -> Exchange:
    """Return a request as it is when it leaves the register."""
    loop = asyncio.get_running_loop()
    arrival = Arrival(b"", loop.time(), client_request_id=f"client-{number}", path="/v1/chat/completions")
    exchange = Exchange(f"chatcmpl-{number:032x}", arrival, StageTimer(is_wanted=False))
    exchange.model = "bench"
    exchange.counters = SERIES.begin("bench", "chat_completions", "stream", arrival.at)
    exchange.counters.tokens(1, loop.time())
    plan = Plan(PlannedRequest(StopFields(64)), [list(range(64))])
    exchange.work = WorkRequest(plan, exchange.timer)
    tally = exchange.work.tally
    tally.note_cached(0, 32)
    tally.completion_tokens, tally.finish_reason = 64, "stop"
    tally.instances.append(INSTANCE)
    for phase in (Phase.ADMITTED, Phase.PREPROCESSED, Phase.DISPATCHED, Phase.STREAMING):
        exchange.enter(phase, loop.time())
    exchange.end()
    return exchange


SERIES: Final = RequestSeries(FrontendFamilies(MetricsRegistry(), "dynamo_frontend", {}))
INSTANCE: Final = Instance(
    namespace="ns", component="c", endpoint="generate", instance_id=0x7E9F, transport={"tcp": "127.0.0.1:1"}
)


def least_microseconds(exchanges: Sequence[Exchange], work: Callable[[Exchange], object]) -> float:
    """Return what `work` takes for one request, in the quickest of many rounds."""
    best = float("inf")
    gc.disable()  # a frontend's collector comes seldom
    for _ in range(ROUNDS):
        began = time.thread_time()
        for exchange in exchanges:
            work(exchange)
        best = min(best, time.thread_time() - began)
    gc.enable()
    return best / len(exchanges) * 1e6


async def end_microseconds() -> tuple[float, float]:
    """Return what noting an ended request takes, and all that the inspector does when a request has ended."""
    exchanges = [ended_exchange(number) for number in range(PER_ROUND)]
    recent = RecentRequests(InspectorClock(), "host:1")
    async with cluster(Path("unused")) as house:
        inspector = house.frontend.parts["inspector"].inspector
        assert inspector is not None
        add, ended = partial(add_with, recent.add), partial(add_with, inspector.ended)
        return least_microseconds(exchanges, add), least_microseconds(exchanges, ended)


def add_with(work: Callable[[Exchange, Outcome], object], exchange: Exchange) -> None:
    """Call `work` with a request that was answered."""
    work(exchange, ANSWERED)


ANSWERED: Final = Outcome(
    "chat_completions", 0.0, Reached.ADMITTED, usage=TokensTaken(64, 32, 64, None), instances=[INSTANCE]
)


def calls_of_inspector(tokens: int) -> float:
    """Return how many calls of Python functions of the inspector one streamed request makes."""
    args = argparse.Namespace(
        source=None, router_mode="", frontend=[], worker=[], requests=100, tokens=32, output=tokens, stream=True
    )
    with tempfile.TemporaryDirectory() as name:
        found, _ = counted(args, Path(name))
    return sum(count for file, _, c_name, count in found if "/frontend/parts/inspector/" in file and not c_name) / 100


def report_requests(_args: argparse.Namespace, _model: Path) -> bool:
    """Measure and print what the inspector costs while nobody looks; return whether that is within the bar."""
    add, end = asyncio.run(end_microseconds())
    few, many = (calls_of_inspector(tokens) for tokens in CALL_TOKENS)
    print("without a viewer:")
    print(f"  RecentRequests.add  {add:6.2f} us  (bar {ADD_BAR})")
    print(f"  the end of a request{end:6.2f} us: all that the inspector does for it")
    print(
        f"  calls of functions of the inspector: {few:.1f} a request, {(many - few) / (CALL_TOKENS[1] - CALL_TOKENS[0]):.2f} a token"
    )
    return add <= ADD_BAR


def main() -> int:
    """Measure and print; tell by the status whether the bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("viewer", "requests"), help="measure only this")
    parser.add_argument("--streams", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--delay", type=float, default=50.0, metavar="S", help="between tokens (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="pairs of windows (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a window (default: %(default)s)")
    args = parser.parse_args()
    model = make_model(HERE.parent / "bench-results" / "model")
    print(f"{os.cpu_count()} cores, CPU time")
    met = [
        measure(args, model)
        for name, measure in (("viewer", report_viewer), ("requests", report_requests))
        if args.only in (None, name)
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
