"""What the frontend's Python costs for one token, layer by layer: no socket, no other process, the CPU clock.

    python benchmarks/token_path.py

An engine with continuous batching sends one frame with a token for every stream. Such frames are given to a real
`MuxConnection`; each row has one more layer of the frontend on top of it, all of them the product's own objects, and a
transport that drops what it is given. The figure is the least of several repeats, in microseconds per token; the second
column is what the row adds to the one above it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import uvloop

from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.http.event_stream import EventStream
from dynamo.frontend.pipeline.exchange import Arrival, Exchange
from dynamo.frontend.pipeline.generation_call import StreamDelivery, open_only_choice
from dynamo.frontend.pipeline.plain import PlainOutput
from dynamo.frontend.pipeline.plan import Plan, WorkRequest
from dynamo.protocol.openai.sse import ChatStream
from dynamo.protocol.worker_request import PlannedRequest, StopFields
from dynamo.router.dispatch.failover import NO_WAIT, DispatchLimits, DispatchRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stream import RoutedStream
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection
from dynamo.runtime.calls.request_plane.mux.frames import step_frames
from dynamo.runtime.calls.request_plane.mux.stream import MuxStream
from dynamo.runtime.http.cycle import Cycle
from dynamo.runtime.http.flow import Gate
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.tiny_model import write_tiny_model

EVENT: Final = b"x" * 250


class NullTransport:
    """Drops what it is given, and counts it."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def writelines(self, parts: list[bytes]) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Counter:
    """Counts ids."""

    def __init__(self) -> None:
        self.seen = 0

    def take_token(self, token_id: int, now: float) -> bool:
        self.seen += 1
        return True

    @staticmethod
    def take_step(lanes: Sequence[Counter], ids: Sequence[int], now: float) -> Sequence[int]:
        for lane in lanes:
            lane.seen += 1
        return ()

    def take_tokens(self, ids: list[int]) -> bool:
        self.seen += len(ids)
        return True


class Taker:
    """Takes every event."""

    is_committed = can_push = True
    pushed_at = 0.0

    async def write(self, data: bytes) -> None:
        pass

    def push(self, data: bytes, now: float) -> bool:
        return True

    def splicer(self, opening: bytes, closing: bytes) -> Taker:
        return self

    @staticmethod
    def push_each(splicers: Sequence[Taker], middles: Sequence[bytes], now: float) -> Sequence[int]:
        return ()


class Bench:
    """One connection with its streams, and a reader on each of them."""

    def __init__(self, streams: int, tokens: list[int], tokenizer: Any) -> None:
        self.transport = NullTransport()
        self.connection = MuxConnection("here", on_lost=lambda connection: None)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.tokenizer, self.tokens = tokenizer, tokens
        self.streams = [self.connection.open("e", b"\x80", Context(str(number))) for number in range(streams)]
        self.metrics = FrontendMetrics(MetricsRegistry())
        self.tasks: list[asyncio.Task[Any]] = []
        self.seen = 0

    def step(self, number: int) -> list[bytes]:
        """Return the frames of one step of the engine: one token for every stream."""
        ids = [stream.stream_id for stream in self.streams]
        return step_frames(ids, [number] * len(ids), [self._token(stream, number) for stream in self.streams])

    def _token(self, stream: MuxStream, number: int) -> int:
        return self.tokens[(number * 7 + stream.stream_id) % len(self.tokens)]

    def say(self, frames: list[bytes]) -> None:
        for one in frames:
            self.connection.data_received(one)

    # -- the readers, one for each row -----------------------------------------------------------------------------------

    async def read_lanes(self, stream: MuxStream) -> None:
        """Take the token ids of a lane, and do nothing with them."""
        await stream.next_batch()
        routed = self._routed(stream)

        await routed.push(lambda items: True, Counter())

    async def read_texts(self, stream: MuxStream) -> None:
        """Take the texts of one choice, as JSON."""
        exchange, model, work = self._request(stream)
        choice = open_only_choice(model, work, exchange.context)
        counters = SimpleNamespace(tokens=lambda count, now: None, token_each=lambda requests, now: None)
        await choice.next()
        output = PlainOutput((b"", b""), Taker(), [], counters, None)  # type: ignore[arg-type]
        await choice.push(lambda deltas: True, output)

    async def read_events(self, stream: MuxStream) -> None:
        """Make events of the texts, and count them."""
        await self._deliver(stream, Taker())

    async def read_answers(self, stream: MuxStream) -> None:
        """Write the whole answer to an HTTP connection."""
        http = SimpleNamespace(transport=self.transport, default_headers=(), answered=lambda: None)
        scope = {"method": "POST", "http_version": "1.1"}
        cycle = Cycle(http, Gate(self.transport), scope, keep_alive=True)  # type: ignore[arg-type]
        splice: Any = cycle.splicer
        events = EventStream(cycle.send, push=cycle.push, splice=splice, peek_seconds=60, keep_alive_seconds=60)
        try:
            await self._deliver(stream, events)
        finally:
            events.close()

    # -- parts -----------------------------------------------------------------------------------------------------------

    async def _deliver(self, stream: MuxStream, events: Any) -> None:
        exchange, model, work = self._request(stream)
        exchange.counters = self.metrics.requests.begin("bench", "chat_completions", "stream", exchange.now())
        chunks = ChatStream(exchange.context.id(), 1_760_000_000, "bench")
        renderer = SimpleNamespace(
            stream=lambda output: chunks.delta(0, "first"),
            splice=chunks.plain_ends,
            end=lambda with_usage: b"",
            keeping=None,
        )
        answer = SimpleNamespace(
            work=work, model=model, exchange=exchange, wants_logprobs=False, explains_routing=False, rename=None
        )
        await StreamDelivery(answer, renderer, None).send(events, b"", with_usage=False)  # type: ignore[arg-type]

    def _request(self, stream: MuxStream) -> tuple[Exchange, Any, WorkRequest]:
        timer = StageTimer()
        exchange = Exchange(str(stream.stream_id), Arrival(b"", 0.0), timer)
        dispatcher = SimpleNamespace(open=lambda request, context: self._routed(stream, request))
        model = SimpleNamespace(dispatcher=dispatcher, text=SimpleNamespace(tokenizer=self.tokenizer), takes_text=False)
        fields = PlannedRequest(StopFields(stop_token_ids_hidden=[0, 1, 2]))
        return exchange, model, WorkRequest(Plan(fields, [[5, 6, 7]]), timer)

    def _routed(self, stream: MuxStream, request: Any = None) -> RoutedStream:
        if request is None:
            request = DispatchRequest({}, [], record=DispatchRecord(), timer=StageTimer(), limits=DispatchLimits())
        dispatcher = SimpleNamespace(pool=None, worker_wait=NO_WAIT, queries_of_death=None, stages=())
        routed = RoutedStream(dispatcher, request, Context("r"))  # type: ignore[arg-type]
        routed._stream = stream
        return routed


async def measure(
    read: Callable[[Bench, MuxStream], Awaitable[None]], make: Callable[[], Bench], steps: int, repeats: int
) -> float:
    """Return the least CPU per token of several repeats, in microseconds."""
    bench = make()
    bench.say(bench.step(0))
    tasks = [asyncio.ensure_future(read(bench, stream)) for stream in bench.streams]
    for _ in range(20):
        await asyncio.sleep(0)
    assert all(stream.lane is not None for stream in bench.streams), "a stream has no lane"
    best, number = float("inf"), 1
    for _ in range(repeats):
        frames = [bench.step(number + step) for step in range(steps)]
        number += steps
        begun = time.process_time()
        for one in frames:
            bench.say(one)
        best = min(best, (time.process_time() - begun) / (steps * len(bench.streams)))
        await asyncio.sleep(0)
    assert all(stream.lane is not None for stream in bench.streams), "a stream left its lane"
    if read is Bench.read_answers:
        assert bench.transport.writes >= number * len(bench.streams), "not every token was written"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 1e6 * best


async def run(streams: int, steps: int, repeats: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(write_tiny_model(Path(directory)))
    table = tokenizer.pieces(skip_special_tokens=True)
    assert table is not None
    tokens = [token for token in range(8, tokenizer.vocab_size) if table[token]]
    rows = {
        "frames, streams and lanes": Bench.read_lanes,
        "+ generation, texts as JSON": Bench.read_texts,
        "+ delivery, metrics": Bench.read_events,
        "+ event stream, HTTP": Bench.read_answers,
    }
    before = 0.0
    print(f"us of CPU per token, {streams} streams, one token of each per step")
    for name, read in rows.items():
        figure = await measure(read, lambda: Bench(streams, tokens, tokenizer), steps, repeats)
        print(f"{name:28} {figure:6.2f} {figure - before:+6.2f}")
        before = figure


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="CPU per token of each layer of the frontend")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    uvloop.run(run(args.streams, args.steps, args.repeats))


if __name__ == "__main__":
    main()
