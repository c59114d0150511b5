"""Routers of the same workers keep one account: each reports what it books, and counts what the others book.

It is best effort. A report that is lost makes the account of another router less exact until the request ends or expires;
a router that starts knows nothing of the requests that run already. Workers report first tokens on the same topic.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Final, Protocol, Self

from dynamo.kv.overlap import WorkerRank
from dynamo.placement.active_load import ActiveLoad
from dynamo.placement.kv_state import Selection
from dynamo.placement.replica_events import (
    MAX_BATCH,
    BadReplicaEvents,
    BookedPrompt,
    BookedWorker,
    BookingEvent,
    PrefillHint,
    RequestStep,
    check_booking,
    decode_binding,
    decode_bookings,
    encode_binding,
    encode_booking,
    encode_bookings,
)
from dynamo.placement.session_affinity import AffinityRecord
from dynamo.router.peers.bookings import PeerBookings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.event_plane.base import Event, EventPublisher, encode_segment
from dynamo.runtime.discovery.base import EVENT_CHANNELS, Delete
from dynamo.runtime.discovery.follow import follow
from dynamo.runtime.endpoint import Endpoint

logger = logging.getLogger(__name__)

BOOKINGS_TOPIC: Final = "active_sequences_events"
BINDINGS_TOPIC: Final = "session_affinity_events"
BATCH_SECONDS: Final = 0.001  # a booking is reported this late at most; requests that come together share a message
STEP_SECONDS: Final = 0.01
"""The same for a first token and an end. Every other router takes every message, so the messages of all are quadratic in the
routers: most steps go with a booking that comes meanwhile, and share its message."""

MAX_QUEUED: Final = 100_000  # bookings that wait to be sent; the newest are dropped

_HEX: Final = re.compile("[0-9a-f]{1,16}")


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
        """Send a booking within `BATCH_SECONDS`, a step within `STEP_SECONDS`; drop the event where too many wait."""
        if len(self._events) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._events.append(event)
        seconds = STEP_SECONDS if self._is_batching and isinstance(event.data, str) else BATCH_SECONDS
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer.when() > loop.time() + seconds:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(seconds, self.flush)

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

    def __init__(
        self,
        endpoint: Endpoint,
        load: ActiveLoad,
        *,
        router_id: int,
        block_size: int,
        is_live: Callable[[WorkerRank], bool] | None = None,
    ) -> None:
        """`endpoint`: that of the workers. `router_id`: of this process, among all routers and workers. `is_live`: whether a
        rank is there; what others book elsewhere does not count. None: it does."""
        self._endpoint, self._load, self._router_id = endpoint, load, router_id
        self._peers = PeerBookings(load, block_size, is_live)
        self._outbox: BookingOutbox | None = None
        self._stack = AsyncExitStack()
        self.received = 0  # events of others that were counted
        self.invalid = 0  # messages and events that could not be read

    async def __aenter__(self) -> Self:
        runtime, scope = self._endpoint.runtime, self._endpoint.event_scope
        try:
            publisher = runtime.events.new_publisher(scope, BOOKINGS_TOPIC)
            self._stack.push_async_callback(publisher.close)
            events = await self._stack.enter_async_context(runtime.events.subscribe(scope, BOOKINGS_TOPIC))
            background = await self._stack.enter_async_context(Background())
            background.keep(partial(self._follow, events, publisher.publisher_id), "bookings of other routers")
            background.keep(partial(self._follow_channels, set[str]()), "channels of other routers")
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
                self.take(event, now, message.publisher_id)
            await asyncio.sleep(0)  # a peer that never stops must not keep the event loop

    def take(self, event: BookingEvent, now: float, publisher_id: int | None = None) -> None:
        """Count one event of another router or of a worker. Own events are ignored, and impossible ones counted.

        `publisher_id`: of its message; None: the router that it names.
        """
        if event.router_id == self._router_id:
            return
        try:
            check_booking(event)
        except BadReplicaEvents as error:
            self.invalid += 1
            logger.debug("an event of publisher %s is not counted: %s", publisher_id, error)
            return
        self.received += 1
        rank = WorkerRank(event.worker.worker_id, event.worker.dp_rank)
        request = event.router_id, event.request_id
        match event.data:
            case BookedPrompt() as prompt:
                self._peers.add(event.router_id if publisher_id is None else publisher_id, request, rank, prompt, now)
            case "Free":
                self._peers.free(request, rank, now)
            case "MarkPrefillCompleted":
                if not self._peers.prefill_completed(request, now):
                    # Of the worker: it knows the request, but not which router booked it.
                    self._load.prefill_completed(event.request_id, now)
                    self._peers.prefill_completed_anywhere(event.request_id, now)

    async def _follow_channels(self, known: set[str]) -> None:
        """Forget a peer with its channel record, where there are such. `known`: those that an attempt that failed had."""
        scope = self._endpoint.event_scope
        prefix = f"{EVENT_CHANNELS}/{scope.path_encoded}/topic/{encode_segment(BOOKINGS_TOPIC)}"
        async with aclosing(follow(self._endpoint.runtime.discovery, prefix, known)) as changes:
            async for batch in changes:
                for change in batch:
                    publisher = change.key.rpartition("/")[2]
                    if isinstance(change, Delete) and _HEX.fullmatch(publisher):
                        self._peers.forget(int(publisher, 16), asyncio.get_running_loop().time())


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
            background.keep(partial(self._follow, events, publisher.publisher_id), "bindings of other routers")
            background.keep(self._reap, "expiry of sessions")
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
