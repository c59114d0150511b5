"""Forward-pass metrics on the event plane: published by engines, relayed from their ZMQ sockets, read by planners."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Final, TypeVar

import msgspec

from dynamo.bindings.opened import Opened, running_loop
from dynamo.common.forward_pass_metrics import (
    ForwardPassMetrics,
    QueuedRequestMetrics,
    ScheduledRequestMetrics,
    decode,
    encode,
)
from dynamo.runtime.calls.event_plane.base import Event
from dynamo.runtime.calls.event_plane.zmq import MAX_MESSAGE_BYTES, SocketReader
from dynamo.runtime.discovery.base import MODEL_CARDS, Change, Put
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint

__all__ = ["FpmDirectPublisher", "FpmEventRelay", "FpmEventSubscriber"]

T = TypeVar("T")

TOPIC: Final = "forward-pass-metrics"
HEARTBEAT_SECONDS: Final = 1.0  # a rank that is silent for longer sends an empty pass
MAX_WAITING: Final = 4096  # passes that wait for a blocked event loop, or for `recv`; the oldest ones go first
MAX_RANKS: Final = 65_536  # whose last pass is kept


class _Held:
    """The base of what runs until its end, or that of its runtime."""

    _opened: Opened[None] | None = None

    def shutdown(self) -> None:
        """End it; any thread. Idempotent; the end of the runtime does it, too."""
        if self._opened is not None:
            self._opened.end()


class FpmDirectPublisher(_Held):
    """Publishes each pass of an engine's ranks. A rank that is silent for 1 s has an empty one: it shows that it lives."""

    def __init__(self, endpoint: Endpoint, worker_id: str, dp_size: int = 1) -> None:
        """Raises ValueError for a `dp_size` below 1."""
        if dp_size < 1:
            raise ValueError(f"dp_size must be at least 1, got {dp_size}")
        self._passes = _Passes(endpoint.runtime.event_loop(), worker_id, dp_size)
        self._opened = Opened(self, endpoint, _sent(endpoint, self._passes), name="FpmDirectPublisher")

    # fmt: off
    def publish(
        self, *, dp_rank: int,
        scheduled_num_prefill_requests: int, scheduled_sum_prefill_tokens: int, scheduled_sum_prefill_kv_tokens: int,
        scheduled_num_decode_requests: int, scheduled_sum_decode_kv_tokens: int,
        queued_num_prefill_requests: int, queued_sum_prefill_tokens: int, queued_num_decode_requests: int,
        queued_sum_decode_kv_tokens: int, wall_time_secs: float,
    ) -> None:
        """Publish one pass; any thread. Raises RuntimeError for a rank that there is not."""
        size = len(self._passes.counters)
        if not 0 <= dp_rank < size:
            raise RuntimeError(f"dp_rank {dp_rank} out of range; FpmDirectPublisher was constructed with dp_size={size}")
        scheduled = ScheduledRequestMetrics(
            scheduled_num_prefill_requests, scheduled_sum_prefill_tokens, 0.0, scheduled_sum_prefill_kv_tokens,
            scheduled_num_decode_requests, scheduled_sum_decode_kv_tokens,
        )
        queued = QueuedRequestMetrics(
            queued_num_prefill_requests, queued_sum_prefill_tokens, 0.0,
            queued_num_decode_requests, queued_sum_decode_kv_tokens,
        )
        self._passes.add(dp_rank, wall_time_secs, scheduled, queued)
    # fmt: on


class _Passes:
    """The passes of a worker on their way to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, worker_id: str, dp_size: int) -> None:
        self.counters = [0] * dp_size
        self._loop, self._worker_id = loop, worker_id
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MAX_WAITING)
        self._woken = asyncio.Event()

    def add(self, rank: int, seconds: float, scheduled: ScheduledRequestMetrics, queued: QueuedRequestMetrics) -> None:
        """Number one pass and have it sent; any thread."""
        with self._lock:
            self.counters[rank] = count = self.counters[rank] + 1
            metrics = ForwardPassMetrics(
                worker_id=self._worker_id, dp_rank=rank, counter_id=count, wall_time=seconds,
                scheduled_requests=scheduled, queued_requests=queued,
            )  # fmt: skip
            self._waiting.append((rank, encode(metrics)))
            if len(self._waiting) == 1:  # else the loop is to be woken already
                with suppress(RuntimeError):  # the loop is closed: the process is on its way out
                    self._loop.call_soon_threadsafe(self._woken.set)

    async def send(self, publish: Callable[[bytes], object]) -> None:
        """Send what comes, and an empty pass of each rank that is silent."""
        sent_at = [self._loop.time()] * len(self.counters)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(sent_at) + HEARTBEAT_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            with self._lock:
                waiting = list(self._waiting)
                self._waiting.clear()
            now = self._loop.time()
            for rank, payload in waiting:
                publish(payload)
                sent_at[rank] = now
            for rank, last in enumerate(sent_at):
                if now >= last + HEARTBEAT_SECONDS:
                    self.add(rank, 0.0, ScheduledRequestMetrics(), QueuedRequestMetrics())
                    sent_at[rank] = now


@asynccontextmanager
async def _sent(endpoint: Endpoint, passes: _Passes) -> AsyncIterator[None]:
    publisher = endpoint.runtime.events.new_publisher(endpoint.event_scope, TOPIC)
    try:
        async with _running(passes.send(publisher.publish)):
            yield
    finally:
        await publisher.close()


class FpmEventRelay(_Held):
    """Publishes the passes that an engine's process sends on a ZMQ socket: an empty part, a number, the metrics."""

    def __init__(self, endpoint: Endpoint, zmq_endpoint: str) -> None:
        """Subscribe to `tcp://HOST:PORT`. Raises ValueError for what is not an address."""
        if "://" not in zmq_endpoint:
            raise ValueError(f"zmq_endpoint must be an address like tcp://127.0.0.1:20380, got {zmq_endpoint!r}")
        self._opened = Opened(self, endpoint, _relayed(endpoint, zmq_endpoint), name="FpmEventRelay")


@asynccontextmanager
async def _relayed(endpoint: Endpoint, address: str) -> AsyncIterator[None]:
    import zmq

    publisher = endpoint.runtime.events.new_publisher(endpoint.event_scope, TOPIC)

    def take(parts: Sequence[bytes]) -> None:
        if len(parts) == 3 and len(parts[1]) == 8:  # else it is of another protocol
            publisher.publish(parts[2])

    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, MAX_WAITING)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.subscribe(b"")
    reader = SocketReader(socket, take)
    try:
        socket.connect(address)
        reader.start()
        yield
    finally:
        reader.close()
        context.term()
        await publisher.close()


class FpmEventSubscriber(_Held):
    """Reads the passes of an endpoint's workers: one by one with `recv`, or the last of each rank after `start_tracking`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Nothing is read before the first `recv` or `start_tracking`."""
        self._endpoint = endpoint
        self._received: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._last: _LastPasses | None = None

    def recv(self) -> bytes | None:
        """Wait for the next pass; None once this is shut down. Raises RuntimeError after `start_tracking`, and on the event
        loop, which brings the passes."""
        if self._last is not None:
            raise RuntimeError("Cannot call recv() after start_tracking()")
        loop = self._endpoint.runtime.event_loop()
        if running_loop() is loop:
            raise RuntimeError("recv() blocks: call it in a thread, with asyncio.to_thread for one")
        if self._opened is None:
            self._opened = Opened(
                self, self._endpoint, _queued(self._endpoint, self._received), name="FpmEventSubscriber"
            )
            asyncio.run_coroutine_threadsafe(self._opened.value(), loop).result()
        found = self._received.get()
        if found is None:
            _put(self._received, None)  # for the next call
        return found

    def start_tracking(self) -> None:
        """Keep the last pass of each rank of the workers whose model is registered."""
        if self._last is None:
            self._last = _LastPasses(self._endpoint)
            self._opened = Opened(self, self._endpoint, self._last.followed(self._endpoint), name="FpmEventSubscriber")

    def get_recent_stats(self) -> dict[tuple[str, int], bytes]:
        """Return the last pass by worker and rank; `dynamo.common.forward_pass_metrics.decode` reads it."""
        return dict(self._tracked().passes)

    def get_model_cards(self) -> dict[str, str]:
        """Return the model card of each worker as JSON."""
        return dict(self._tracked().cards)

    def _tracked(self) -> _LastPasses:
        if self._last is None:
            raise RuntimeError("start_tracking() has not been called")
        return self._last


class _LastPasses:
    """The last pass of each rank, and the model cards of the workers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.passes: dict[tuple[str, int], bytes] = {}
        self.cards: dict[str, str] = {}
        self._prefix = f"{MODEL_CARDS}/{endpoint.namespace}/{endpoint.component}/{endpoint.name}"

    @asynccontextmanager
    async def followed(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Follow the passes and the cards."""
        changes = follow(endpoint.runtime.discovery, self._prefix)
        async with (
            aclosing(changes),
            _events(endpoint) as events,
            _running(_each(events, self._take), _each(changes, self._apply)),
        ):
            yield

    def _take(self, event: Event) -> None:
        found = decode(event.payload)
        if found is None or found.worker_id not in self.cards:
            return
        key = (found.worker_id, found.dp_rank)
        if key in self.passes or len(self.passes) < MAX_RANKS:
            self.passes[key] = event.payload

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            suffix = change.key.removeprefix(f"{self._prefix}/")  # of an adapter it has a second part
            try:
                worker = str(int(suffix, 16))
                card = msgspec.json.decode(change.value)["card_json"] if isinstance(change, Put) else None
            except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError):
                continue
            if card is not None:
                self.cards[worker] = msgspec.json.encode(card).decode()
            elif self.cards.pop(worker, None) is not None:
                self.passes = {key: value for key, value in self.passes.items() if key[0] != worker}


@asynccontextmanager
async def _queued(endpoint: Endpoint, received: queue.Queue[bytes | None]) -> AsyncIterator[None]:
    try:
        async with _events(endpoint) as events, _running(_each(events, lambda event: _put(received, event.payload))):
            yield
    finally:
        _put(received, None)


def _events(endpoint: Endpoint) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
    return endpoint.runtime.events.subscribe(endpoint.event_scope, TOPIC)


@asynccontextmanager
async def _running(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run these until the block is left; the failure of one ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()


def _put(received: queue.Queue[bytes | None], payload: bytes | None) -> None:
    if received.full():
        with suppress(queue.Empty):  # a reader was faster
            received.get_nowait()
    received.put_nowait(payload)


async def _each(items: AsyncIterator[T], take: Callable[[T], object]) -> None:
    async for item in items:
        take(item)
