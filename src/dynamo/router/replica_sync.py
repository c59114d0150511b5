"""Routers of the same workers keep one account: each reports what it books, and counts what the others book.

It is best effort. A report that is lost makes the account of another router less exact until the request ends or expires;
a router that starts knows nothing of the requests that run already. Workers report first tokens on the same topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final, Protocol, Self

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.replica_events import (
    MAX_BATCH,
    BadReplicaEvents,
    BookedPrompt,
    BookedWorker,
    BookingEvent,
    PrefillHint,
    RequestStep,
    decode_binding,
    decode_bookings,
    encode_binding,
    encode_booking,
    encode_bookings,
)
from dynamo.placement.session_affinity import AffinityRecord
from dynamo.router.kv_router import Selection
from dynamo.runtime.endpoint import Endpoint
from dynamo.runtime.event_plane.base import Event, EventPublisher
from dynamo.runtime.tasks import Background

__all__ = ["BINDINGS_TOPIC", "BOOKINGS_TOPIC", "BookingOutbox", "ReplicaSync", "SessionSync"]

logger = logging.getLogger(__name__)

BOOKINGS_TOPIC: Final = "active_sequences_events"
BINDINGS_TOPIC: Final = "session_affinity_events"
BATCH_SECONDS: Final = 0.001  # a booking is reported this late at most; requests that come together share a message
MAX_QUEUED: Final = 100_000  # bookings that wait to be sent; the newest are dropped
MAX_ROUTERS: Final = 1_024  # whose bookings are remembered as theirs; the one that was silent for longest goes first
MAX_RANKS: Final = 65_536  # that are counted because another router named them


class BookingOutbox:
    """Events on their way to the event plane, gathered for a moment. Use it on one event loop."""

    __slots__ = ("_events", "_is_batching", "_publisher", "_timer", "dropped")

    def __init__(self, publisher: EventPublisher, *, is_batching: bool) -> None:
        """`is_batching`: several events share a message, as over ZMQ; else each has its own, as over NATS."""
        self._publisher = publisher
        self._is_batching = is_batching
        self._events: list[BookingEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    def put(self, event: BookingEvent) -> None:
        """Send an event within `BATCH_SECONDS`; drop it where too many wait."""
        if len(self._events) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._events.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self.flush)

    def flush(self) -> None:
        """Send what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        if not self._is_batching:
            for event in events:
                self._publisher.publish(encode_booking(event))
            return
        for start in range(0, len(events), MAX_BATCH):
            self._publisher.publish(encode_bookings(events[start : start + MAX_BATCH]))


class ReplicaSync:
    """Reports the bookings of one router, and takes those of the others into the same account.

    `async with ReplicaSync(endpoint, router.load, ...) as sync: router.observer = sync`. What happens before the block is
    entered and after it is left is not reported.
    """

    def __init__(self, endpoint: Endpoint, load: ActiveLoad, *, router_id: int, block_size: int) -> None:
        """`endpoint`: that of the workers. `router_id`: of this process, among all routers and workers."""
        self._endpoint, self._load = endpoint, load
        self._router_id, self._block_size = router_id, block_size
        self._outbox: BookingOutbox | None = None
        self._stack = AsyncExitStack()
        self._routers: OrderedDict[int, None] = OrderedDict()  # other routers, the latest last
        self.received = 0  # events of others that were counted
        self.invalid = 0  # messages that could not be read

    async def __aenter__(self) -> Self:
        runtime, scope = self._endpoint.runtime, self._endpoint.event_scope
        try:
            publisher = runtime.events.new_publisher(scope, BOOKINGS_TOPIC)
            self._stack.push_async_callback(publisher.close)
            events = await self._stack.enter_async_context(runtime.events.subscribe(scope, BOOKINGS_TOPIC))
            background = await self._stack.enter_async_context(Background())
            background.start(self._follow(events, publisher.publisher_id), "bookings of other routers")
            self._outbox = BookingOutbox(publisher, is_batching=runtime.event_plane != "nats")
            self._stack.callback(self._end)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def _end(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.flush()

    @property
    def dropped(self) -> int:
        """How many own events were not sent, as too many waited."""
        return 0 if self._outbox is None else self._outbox.dropped

    # -- what this router does (`kv_router.BookingObserver`) ----------------------------------------------------------

    def booked(self, request_id: str, selection: Selection) -> None:
        """Report a request that was booked."""
        request = selection.state.request
        uncached = max(0, request.prompt_tokens - selection.cached_tokens)
        hint = PrefillHint(uncached) if request.tracks_prefill else None
        prompt = BookedPrompt(selection.tracking_sequence, request.tracks_prefill, request.expected_output, hint)
        self._report(request_id, selection.rank, prompt)

    def prefill_completed(self, request_id: str, rank: WorkerRank) -> None:
        """Report the first token of a request."""
        self._report(request_id, rank, "MarkPrefillCompleted")

    def freed(self, request_id: str, rank: WorkerRank) -> None:
        """Report the end of a request."""
        self._report(request_id, rank, "Free")

    def _report(self, request_id: str, rank: WorkerRank, data: BookedPrompt | RequestStep) -> None:
        if self._outbox is not None:
            self._outbox.put(BookingEvent(request_id, BookedWorker(*rank), data, self._router_id))

    # -- what others do ----------------------------------------------------------------------------------------------

    async def _follow(self, events: AsyncIterator[Event], own_publisher: int) -> None:
        async for message in events:
            if message.publisher_id == own_publisher:
                continue
            try:
                found = decode_bookings(message.payload)
            except BadReplicaEvents as error:
                self.invalid += 1
                logger.warning("a message of publisher %x is not counted: %s", message.publisher_id, error)
                continue
            now = asyncio.get_running_loop().time()
            for event in found:
                self.take(event, now)

    def take(self, event: BookingEvent, now: float) -> None:
        """Count one event of another router or of a worker. Own events are ignored."""
        if event.router_id == self._router_id:
            return
        self.received += 1
        rank = WorkerRank(event.worker.worker_id, event.worker.dp_rank)
        match event.data:
            case BookedPrompt() as prompt:
                self._add(event, rank, prompt, now)
            case "Free":
                self._load.free(_key(event.router_id, event.request_id), now, rank)
            case "MarkPrefillCompleted" if event.router_id in self._routers:
                self._load.prefill_completed(_key(event.router_id, event.request_id), now)
            case "MarkPrefillCompleted":  # of the worker: it knows the request, but not which router booked it
                self._load.prefill_completed(event.request_id, now)
                for router_id in self._routers:
                    self._load.prefill_completed(_key(router_id, event.request_id), now)

    def _add(self, event: BookingEvent, rank: WorkerRank, prompt: BookedPrompt, now: float) -> None:
        self._routers[event.router_id] = None
        self._routers.move_to_end(event.router_id)
        if len(self._routers) > MAX_ROUTERS:
            self._routers.popitem(last=False)
        if not self._load.knows(rank) and len(self._load.ranks()) >= MAX_RANKS:
            return
        sequence = prompt.token_sequence or ()
        hint = prompt.prefill_load_hint
        uncached = 0 if hint is None else hint.initial_effective_prefill_tokens
        tokens = max(uncached, len(sequence) * self._block_size)  # a report has not the length of the prompt
        self._load.add(
            _key(event.router_id, event.request_id),
            rank,
            sequence,
            prompt_tokens=tokens,
            cached_tokens=tokens - uncached,
            now=now,
            expected_output=prompt.expected_output_tokens,
            counts_prefill=prompt.track_prefill_tokens and hint is not None,
        )


class SharedBindings(Protocol):
    """What is needed of a table of sessions, or of several."""

    @property
    def reap_seconds(self) -> float:
        """How often `reap` is to be called."""
        ...

    def advise(self, record: AffinityRecord, now: float) -> bool:
        """Take what another router reports; return whether it is used."""
        ...

    def reap(self, now: float) -> int:
        """Drop what has been idle for too long; return how many."""
        ...


class SessionSync:
    """Reports the bindings of sessions, and takes those of other routers as advice. Use as `async with`."""

    def __init__(self, endpoint: Endpoint, affinity: SharedBindings) -> None:
        """`endpoint`: that of the workers."""
        self._endpoint, self._affinity = endpoint, affinity
        self._publisher: EventPublisher | None = None
        self._stack = AsyncExitStack()
        self.invalid = 0  # messages that could not be read

    async def __aenter__(self) -> Self:
        runtime, scope = self._endpoint.runtime, self._endpoint.event_scope
        try:
            publisher = runtime.events.new_publisher(scope, BINDINGS_TOPIC)
            self._stack.push_async_callback(publisher.close)
            events = await self._stack.enter_async_context(runtime.events.subscribe(scope, BINDINGS_TOPIC))
            background = await self._stack.enter_async_context(Background())
            background.start(self._follow(events, publisher.publisher_id), "bindings of other routers")
            background.start(self._reap(), "expiry of sessions")
        except BaseException:
            await self._stack.aclose()
            raise
        self._publisher = publisher
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._publisher = None
        await self._stack.aclose()

    def report(self, record: AffinityRecord | None) -> None:
        """Report a binding that was made, used or let go; None: there is nothing to report."""
        if record is not None and self._publisher is not None:
            self._publisher.publish(encode_binding(record))

    async def _follow(self, events: AsyncIterator[Event], own_publisher: int) -> None:
        async for message in events:
            if message.publisher_id == own_publisher:
                continue
            try:
                record = decode_binding(message.payload)
            except BadReplicaEvents as error:
                self.invalid += 1
                logger.warning("a message of publisher %x is not used: %s", message.publisher_id, error)
                continue
            self._affinity.advise(record, asyncio.get_running_loop().time())

    async def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._affinity.reap_seconds)
            self._affinity.reap(loop.time())


def _key(router_id: int, request_id: str) -> str:
    """Return the name of another router's booking: a client may send the same request id to two routers."""
    return f"{router_id:x}/{request_id}"
