"""Reports first tokens of a lower-level worker's requests to routers, which then count their prompts as computed.

A router learns it from the answer in any case; the report comes earlier where the answer waits for its first chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from dynamo.bindings.opened import Opened, running_loop
from dynamo.placement.replica_events import BookedWorker, BookingEvent, encode_booking, encode_bookings
from dynamo.protocol.model_types import WorkerType
from dynamo.router.peers.replica_sync import BOOKINGS_TOPIC
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.event_plane.base import EventPublisher
from dynamo.runtime.endpoint import Endpoint

__all__ = ["FirstTokenSource", "open_source"]

MAKES_TOKENS: Final = (WorkerType.Aggregated, WorkerType.Decode)
MAX_RANK: Final = 2**32 - 1


class FirstTokenSource:
    """What `await endpoint.first_token_source(...)` gives. It ends with its runtime, or when it is collected."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._worker_id = endpoint.connection_id()
        self._loop = endpoint.runtime.event_loop()
        self._encode = encode_booking if endpoint.runtime.event_plane == "nats" else _in_batch
        self._publisher: EventPublisher | None = None
        self._opened = Opened(self, endpoint, _publisher_of(endpoint), name="FirstTokenSource")

    async def ready(self) -> None:
        """Wait until reports are sent. Raises what keeps them from being sent."""
        self._publisher = await self._opened.value()

    def bind(self, context: Context, dp_rank: int | None = None) -> None:
        """Let `context.notify_first_token()` report the request of a context, once; any thread may call that.

        `dp_rank`: that serves the request; None: the only one. Raises ValueError for a rank that cannot be.
        """
        rank = 0 if dp_rank is None else dp_rank
        if type(rank) is not int or not 0 <= rank <= MAX_RANK:
            raise ValueError(f"dp_rank must be an integer from 0 to {MAX_RANK}, got {dp_rank!r}")
        worker = BookedWorker(self._worker_id, rank)
        event = BookingEvent(context.id(), worker, "MarkPrefillCompleted", self._worker_id)
        context.on_first_token(partial(self._report, event))

    def _report(self, event: BookingEvent) -> None:
        if running_loop() is self._loop:
            self._publish(event)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._publish, event)

    def _publish(self, event: BookingEvent) -> None:
        if self._publisher is not None:
            self._publisher.publish(self._encode(event))


async def open_source(endpoint: Endpoint, worker_type: WorkerType) -> FirstTokenSource | None:
    """Return the source of an endpoint; None for a worker that makes no tokens of an answer (prefill, encode).

    Raises TypeError for what is no WorkerType.
    """
    if not isinstance(worker_type, WorkerType):
        raise TypeError(f"worker_type must be a WorkerType, got {type(worker_type).__name__}")
    if worker_type not in MAKES_TOKENS:
        return None
    source = FirstTokenSource(endpoint)
    await source.ready()
    return source


def _in_batch(event: BookingEvent) -> bytes:
    return encode_bookings([event])


@asynccontextmanager
async def _publisher_of(endpoint: Endpoint) -> AsyncIterator[EventPublisher]:
    publisher = endpoint.runtime.events.new_publisher(endpoint.event_scope, BOOKINGS_TOPIC)
    try:
        yield publisher
    finally:
        await publisher.close()
