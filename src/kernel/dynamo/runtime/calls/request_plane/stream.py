"""The caller's end of one response stream, whichever plane it came in on: received items, waiting readers, the end.

The life of a stream is the table `TRANSITIONS`. An event without a row is ignored: a stream is closed on every path, and the
two sides of a wire may end it at the same time.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from dynamo.errors import DynamoException, StreamIncomplete, revive
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.runtime.calls.request_plane.base import (
    END_INDEX,
    FINISH_SECONDS,
    INITIAL_CREDITS,
    OffsetCounter,
    StreamItem,
    TokenLane,
)


class StreamState(enum.Enum):
    """Where a stream is in its life."""

    __hash__ = object.__hash__  # of identity, as there is one of each: the inherited one is a call of Python

    OPEN = "open"  # items may come
    DRAINING = "draining"  # the reader is done, and only the END is awaited
    ENDED = "ended"  # nothing more comes; the reader may still take what is there
    CLOSED = "closed"  # released: nothing is kept, nothing is awaited


class StreamEvent(enum.Enum):
    """What happens to a stream."""

    __hash__ = object.__hash__

    END = "end"  # the worker ended it, cleanly or with an error
    LOST = "lost"  # its connection is gone
    FINISH = "finish"  # the reader has the terminal chunk and leaves
    KILL = "kill"  # the reader is gone


TRANSITIONS: Final[Mapping[StreamState, Mapping[StreamEvent, StreamState]]] = {
    StreamState.OPEN: {
        StreamEvent.END: StreamState.ENDED,
        StreamEvent.LOST: StreamState.ENDED,
        StreamEvent.FINISH: StreamState.DRAINING,
        StreamEvent.KILL: StreamState.CLOSED,
    },
    StreamState.DRAINING: {
        StreamEvent.END: StreamState.CLOSED,
        StreamEvent.LOST: StreamState.CLOSED,
        StreamEvent.KILL: StreamState.CLOSED,
    },
    StreamState.ENDED: {StreamEvent.FINISH: StreamState.CLOSED, StreamEvent.KILL: StreamState.CLOSED},
    StreamState.CLOSED: {},
}


OnFirst = Callable[[DynamoException | None], None]


class StreamBuffer(ABC):
    """Implements `ResponseStream` but for how a plane sends a stop, a kill and credits.

    A plane calls `deliver`, `end` and `lost`. The attributes without an underscore are for a connection that hands out items
    of many streams at a time.
    """

    GRANT_AT: ClassVar[int] = INITIAL_CREDITS // 2
    """Credits that a reader must have used before they are granted back: half a window, so grants are few."""

    __slots__ = (
        "_drain_timer", "_error", "_on_first", "_on_release", "_others", "_waiter", "consumed", "items", "listener",
        "next_offset", "state", "touched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.listener: Callable[[], None] | None = None
        self.state = StreamState.OPEN
        self.touched = False  # the listener is about to be called
        self._waiter: asyncio.Future[None] | None = None
        self._error: DynamoException | None = None
        self.next_offset = 0  # of choice 0, nearly always the only one
        self._others: OffsetCounter | None = None
        self.consumed = 0
        self._drain_timer: asyncio.TimerHandle | None = None
        self._on_first: OnFirst | None = None
        self._on_release: tuple[Callable[[], None], ...] = ()

    # -- ResponseStream ------------------------------------------------------------------------------------------

    async def next_batch(self) -> list[StreamItem]:
        while True:
            batch = self.take()
            if batch is None:
                return []
            if batch:
                return batch
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> list[StreamItem] | None:
        batch = self.items
        if not batch:
            if self.state is StreamState.OPEN or self.state is StreamState.DRAINING:
                return batch
            if self._error is not None:
                self._first(self._error)
                raise self._error
            return None
        self.items = []
        consumed = 0
        for item in batch:
            index = item.index
            if index >= 0:
                count = len(item.token_ids)
                if index == 0:
                    expected = self.next_offset
                    self.next_offset = expected + count
                else:
                    expected = self._advance(index, count)
                if item.offset != expected:
                    self._broken(f"choice {index} jumped to token {item.offset}")
                    return batch[: batch.index(item)] or self.take()
                consumed += count or 1
            elif index == END_INDEX:
                self._read_end(item)
                batch.pop()  # nothing follows an END
                if not batch:
                    return self.take()
            else:
                consumed += item.offset  # an object item carries its cost there
        self.consumed += consumed
        if self.consumed >= self.GRANT_AT:
            used, self.consumed = self.consumed, 0
            self._grant(used)
        if self._on_first is not None:
            self._first(None)
        return batch

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self.listener = arrived
        if arrived is not None and (self.items or self.state is not StreamState.OPEN):
            self._call_soon()

    def open_lane(self, lane: TokenLane, closed: Callable[[BaseException | None], None]) -> bool:
        return False

    def stop(self) -> None:
        if self.state is StreamState.OPEN:
            self._send_stop()

    def kill(self) -> None:
        was_ended = self.state is StreamState.ENDED
        if not self._move(StreamEvent.KILL):
            return
        self.items.clear()
        if not was_ended:
            self._send_kill()
        self._wake()

    def finish(self) -> None:
        self._release()
        if not self._move(StreamEvent.FINISH):
            return
        self.items.clear()
        if self.state is StreamState.DRAINING:
            self._drain_timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, self.kill)
            self._drain()

    def close(self) -> None:
        self._release()
        if self.state is not StreamState.DRAINING:
            self.kill()

    def book(self, *, first: OnFirst | None, released: Callable[[], None] | None) -> None:
        if self._on_first is not None and first is not None:
            first = _both(self._on_first, first)
        self._on_first = first or self._on_first
        if released is not None:
            self._on_release += (released,)

    @property
    def tokens_taken(self) -> int:
        return self.next_offset

    @property
    def failure(self) -> DynamoException | None:
        return self._error

    def follow(self, context: Context) -> None:
        """Pass a stop or kill of the caller's context on to the worker, until the stream is released."""
        self._on_release += (context.on_cancel(on_loop(asyncio.get_running_loop(), self._cancelled)),)

    # -- for the plane -------------------------------------------------------------------------------------------

    def deliver(self, item: StreamItem) -> None:
        """Take an item that has arrived; an item with `END_INDEX` ends the stream."""
        if item.index == END_INDEX:
            self.end_with(item)
        elif self.state is StreamState.OPEN:
            self.items.append(item)
            self._wake()

    def end_with(self, item: StreamItem) -> None:
        """End the stream with its END item, which the reader takes behind all others."""
        if self._move(StreamEvent.END) and self.state is StreamState.ENDED:
            self.items.append(item)
            self._wake()

    def end(self, error: DynamoException | None) -> bool:
        """End the stream where no END item travels; whether it had not ended before."""
        if not self._move(StreamEvent.END):
            return False
        self._error = error
        return True

    def lost(self, error: DynamoException) -> None:
        """End the stream with `error`. Items that had arrived can still be read."""
        if self._move(StreamEvent.LOST) and self.state is StreamState.ENDED:
            self._error = error
            self._wake()

    def call_listener(self) -> None:
        """Let the reader take what is there; twice where the end came together with the last items."""
        self.touched = False
        listener = self.listener
        if listener is not None:  # the reader may have left by now
            listener()
            if self.state is StreamState.ENDED and self.listener is not None:
                self.listener()

    # -- inside --------------------------------------------------------------------------------------------------

    def _move(self, event: StreamEvent) -> bool:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            return False
        self.state = following
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        return True

    def _advance(self, index: int, count: int) -> int:
        if self._others is None:
            self._others = OffsetCounter()
        return self._others.advance(index, count)

    def _read_end(self, item: StreamItem) -> None:
        if item.extra is not None:
            self._error = revive(item.extra)
            return
        arrived = self.next_offset + (0 if self._others is None else self._others.total)
        if item.offset != arrived:
            self._error = StreamIncomplete(f"the worker sent {item.offset} tokens, {arrived} of them arrived")

    def _broken(self, what: str) -> None:
        self.kill()
        self._error = StreamIncomplete(f"the stream is not whole: {what}")

    def _first(self, error: DynamoException | None) -> None:
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first(error)

    def _release(self) -> None:
        released, self._on_release = self._on_release, ()
        self._on_first = None
        for call in released:
            call()

    def _cancelled(self, killed: bool) -> None:
        if killed:
            self.kill()
        else:
            self.stop()

    def _wake(self) -> None:
        """Wake the reader: an item has arrived, or the stream has ended."""
        if self.listener is not None:
            self._call_soon()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _call_soon(self) -> None:
        """Call the listener in the next turn of the loop, and not from inside the call that brought something."""
        if not self.touched:
            self.touched = True
            asyncio.get_running_loop().call_soon(self.call_listener)

    # -- what differs between the planes -------------------------------------------------------------------------

    @abstractmethod
    def _send_stop(self) -> None:
        """Request the end from the worker."""

    @abstractmethod
    def _send_kill(self) -> None:
        """Report to the worker that the reader is gone, and let go of the stream's place on the connection."""

    @abstractmethod
    def _grant(self, credits: int) -> None:
        """Grant the producer the credits that the reader has taken since the last grant."""

    def _drain(self) -> None:
        """Drop all further items: only the END is awaited from now on."""
        return


def _both(earlier: OnFirst, later: OnFirst) -> OnFirst:
    def first(error: DynamoException | None) -> None:
        earlier(error)
        later(error)

    return first
