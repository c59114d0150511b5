"""What leaves on one `mux` connection of a worker: all items of one turn of the event loop in one frame."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.errors import InvalidArgument, describe
from dynamo.runtime.calls.request_plane.base import END_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import items_frames, step_frames

if TYPE_CHECKING:
    from dynamo.runtime.calls.request_plane.mux.sink import MuxSink

logger = logging.getLogger(__name__)

MAX_BACKLOG_ITEMS: Final = 65_536  # of a caller that does not read: what its own requests may still add
MAX_BACKLOG_BYTES: Final = 1024 * 1024  # the same for the answers to its control frames

UNENCODABLE: Final = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)


class Step:
    """One plain token of each of many streams, as columns, on its way before what is in `ItemOutbox.items`."""

    __slots__ = ("is_read", "offsets", "stream_ids", "token_ids", "turn")

    def __init__(self) -> None:
        self.is_read = False  # whether the caller reads STEP frames
        self.turn = 0  # how often everything that waited was taken: a stream may be in a step once in a turn
        self.stream_ids: list[int] = []
        self.offsets: list[int] = []
        self.token_ids: list[int] = []

    def take(self) -> tuple[list[int], list[int], list[int]]:
        """Return the columns and begin the next turn."""
        self.turn += 1
        columns = self.stream_ids, self.offsets, self.token_ids
        self.stream_ids, self.offsets, self.token_ids = [], [], []
        return columns


class _FirstItems:
    """Times the first item of each stream. When it leaves and not where it is made: a token of a stream under way pays nothing."""

    __slots__ = ("_answered", "arrived_at")

    def __init__(self, answered: Callable[[float], object]) -> None:
        self._answered = answered
        self.arrived_at: dict[int, float] = {}  # streams that have sent nothing yet: when their request came

    def left(self, items: Sequence[tuple[Any, ...]]) -> None:
        """Report the streams that have now sent their first item."""
        now = perf_counter()
        for item in items:
            arrived = self.arrived_at.pop(item[0], None)
            if arrived is not None and item[1] != END_INDEX:
                self._answered(now - arrived)


class ItemOutbox:
    """Items and control frames on their way to one transport.

    Items wait while the socket is full: each stream's credit bounds them. Control frames do not wait, so those are bounded
    here. The attributes without an underscore are read by every sink for every token.
    """

    __slots__ = (
        "_backlog_bytes", "_control", "_cut", "_end_stream", "_first", "_loop", "flush_scheduled", "items", "paused",
        "step", "transport", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        *,
        answered: Callable[[float], object],
        cut: Callable[[str], None],
        end_stream: Callable[[int], None],
    ) -> None:
        """`answered` gets the seconds from a request's arrival to its first item. `cut` drops the connection of a caller
        that does not read, naming the limit. `end_stream` kills the request of a stream whose item cannot be encoded."""
        self._loop = asyncio.get_running_loop()
        self._cut, self._end_stream = cut, end_stream
        self._first = _FirstItems(answered)
        self._backlog_bytes = 0  # of control frames, since the caller stopped reading
        self._control: list[bytes] = []
        self.items: list[tuple[Any, ...]] = []
        self.step = Step()
        self.flush_scheduled = False
        self.paused = False
        self.transport: asyncio.Transport | None = None
        self.waiting: set[MuxSink] = set()

    @property
    def is_overfull(self) -> bool:
        """Whether a caller that does not read has left too many answers unread to get another one."""
        return self.paused and len(self.items) > MAX_BACKLOG_ITEMS

    def expect_answer(self, stream_id: int) -> None:
        """Measure the time to a request's first item, from the arrival of the request."""
        self._first.arrived_at[stream_id] = perf_counter()

    def expect_no_answer(self, stream_id: int) -> None:
        """Forget a request that its caller has given up."""
        self._first.arrived_at.pop(stream_id, None)

    def add(self, item: tuple[Any, ...]) -> None:
        """Send an item with the next flush."""
        self.items.append(item)
        if not self.flush_scheduled:
            self.schedule_flush()

    def send(self, control: bytes) -> None:
        """Send a control frame with the next flush, before all items."""
        self._control.append(control)
        if not self.flush_scheduled:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        """Flush at the next turn of the loop: whatever else is produced until then travels in the same frame."""
        if not self.flush_scheduled:
            self.flush_scheduled = True
            self._loop.call_soon(self.flush)

    def pause(self) -> None:
        """Pause: the socket is full."""
        self.paused = True

    def resume(self) -> None:
        """Resume: the socket has room again."""
        self.paused = False
        self._backlog_bytes = 0
        for sink in list(self.waiting):
            sink.wake()
        if self.items or self.step.stream_ids:
            self.schedule_flush()

    def clear(self) -> None:
        """Drop everything: the connection is lost."""
        self.transport = None
        self._drop_all()
        self._first.arrived_at.clear()

    def _drop_all(self) -> None:
        self.items.clear()
        self._control.clear()
        self.step.take()

    def flush(self) -> None:
        """Write what can be written now."""
        self.flush_scheduled = False
        transport = self.transport
        if transport is None or transport.is_closing():
            self._drop_all()
            return
        parts = self._control
        if parts:
            self._control = []
            if self.paused:  # these overtake the items; a caller that reads neither may not request ever more of them
                self._backlog_bytes += sum([len(part) for part in parts])
                if self._backlog_bytes > MAX_BACKLOG_BYTES:
                    self._cut("backlog")
                    return
        if (self.items or self.step.stream_ids) and not self.paused:
            frames = self._take()
            parts = [*parts, *frames] if parts else frames
        if parts:
            transport.writelines(parts)

    def _take(self) -> list[bytes]:
        """Return everything that waits, as frames."""
        stream_ids, offsets, token_ids = self.step.take()
        frames = step_frames(stream_ids, offsets, token_ids)
        items, self.items = self.items, []
        if self._first.arrived_at:
            self._first.left([(stream_id, 0) for stream_id in stream_ids])
            self._first.left(items)
        return frames + self._encode(items) if items else frames

    def _encode(self, items: list[tuple[Any, ...]]) -> list[bytes]:
        try:
            return items_frames(items)
        except UNENCODABLE:
            pass
        # One chunk holds a value that msgpack cannot carry. Its stream ends there, the others must not notice.
        parts: list[bytes] = []
        failed: set[int] = set()
        for item in items:
            stream_id = item[0]
            if stream_id in failed:
                continue
            try:
                parts += items_frames([item])
            except UNENCODABLE as error:
                failed.add(stream_id)
                failure = InvalidArgument(f"the engine produced a value that cannot be encoded: {error}")
                logger.error("stream %d: %s; its request is killed", stream_id, failure)
                parts += items_frames([(stream_id, END_INDEX, 0, (), None, describe(failure))])
                self._end_stream(stream_id)
        return parts
