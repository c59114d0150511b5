"""The caller's end of one `mux` stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynamo.runtime.calls.request_plane.base import INITIAL_CREDITS, StreamItem, TokenLane
from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.mux.frames import ProtocolError, decode_item
from dynamo.runtime.calls.request_plane.stream import StreamBuffer, StreamState

if TYPE_CHECKING:
    from dynamo.runtime.calls.request_plane.mux.connection import MuxConnection

MAX_BUFFERED_ITEMS: Final = 2 * INITIAL_CREDITS + 64  # of one stream; an honest worker stays below half of it
MAX_ITEM_BYTES: Final = 64 * 1024 * 1024  # one object item (such as an image)
MAX_DECODED_ITEM_BYTES: Final = 512 * 1024 * 1024


class MuxStream(StreamBuffer):
    """One response stream at the caller. Its connection hands out the items of all streams of a frame, then calls the
    listeners of those that got some."""

    __slots__ = ("_connection", "_lane_closed", "_parts", "_parts_bytes", "lane", "lane_ids", "stream_id")

    def __init__(self, connection: MuxConnection, stream_id: int) -> None:
        super().__init__()
        self._connection = connection
        self._parts: list[bytes] | None = None
        self._parts_bytes = 0
        self.stream_id = stream_id
        self.lane: TokenLane | None = None
        self.lane_ids: list[int] | None = None  # arrived in this frame, about to be passed on
        self._lane_closed: Callable[[BaseException | None], None] | None = None

    def open_lane(self, lane: TokenLane, closed: Callable[[BaseException | None], None]) -> bool:
        """Pass token ids on past the buffer, once per frame."""
        self.lane, self._lane_closed = lane, closed
        return True

    def listen(self, arrived: Callable[[], None] | None) -> None:
        self.lane = self._lane_closed = None
        super().listen(arrived)

    def pass_tokens(self) -> None:
        """Hand on what the connection has put into `lane_ids`."""
        ids, self.lane_ids = self.lane_ids, None
        if ids is None:
            return
        if self.consumed >= self.GRANT_AT:
            self.renew_credit()
        lane = self.lane
        if lane is None:  # the reader has left since they arrived; it may come back and take them
            if self.state is StreamState.OPEN or self.state is StreamState.ENDED:
                self.give_back(ids)
            return
        try:
            if lane.take_tokens(ids):
                return
        except BaseException as error:
            self.close_lane(error)
        else:
            self.close_lane(None)

    def renew_credit(self) -> None:
        """Grant the producer what the lane has taken since the last grant."""
        used, self.consumed = self.consumed, 0
        self._grant(used)

    def give_back(self, ids: list[int]) -> None:
        """Put tokens that were counted as passed on into the buffer again, as if they had just arrived."""
        self.next_offset -= len(ids)
        self.consumed -= len(ids)
        self.items.insert(0, StreamItem(self.stream_id, 0, self.next_offset, ids))
        self._wake()

    def close_lane(self, error: BaseException | None) -> None:
        """Close the lane: its reader takes no more there, or has failed with `error`."""
        closed, self.lane, self._lane_closed = self._lane_closed, None, None
        if closed is not None:
            closed(error)

    def deliver(self, item: StreamItem) -> None:
        super().deliver(item)
        if len(self.items) > MAX_BUFFERED_ITEMS:
            raise ProtocolError(f"stream {self.stream_id} was sent more than its credit allows")

    def assemble(self, payload: bytes, last: bool) -> StreamItem | None:
        """Add a piece of an item too large for one frame; the item once its last piece is there."""
        if self._parts is None:
            self._parts = []
            self._parts_bytes = 0
        self._parts_bytes += len(payload)
        if self._parts_bytes > MAX_ITEM_BYTES:
            raise ProtocolError(f"an item of more than {MAX_ITEM_BYTES} bytes")
        self._parts.append(payload)
        if not last:
            return None
        whole, self._parts = b"".join(self._parts), None
        if exceeds_when_decoded(whole, MAX_DECODED_ITEM_BYTES):
            raise ProtocolError(f"an item of {len(whole)} bytes takes more than {MAX_DECODED_ITEM_BYTES} once decoded")
        return decode_item(whole)

    def _call_soon(self) -> None:
        self._connection.inbound.touch(self)

    def _send_stop(self) -> None:
        self._connection.cancel(self.stream_id, kill=False)

    def _send_kill(self) -> None:
        self._connection.drop(self.stream_id)

    def _grant(self, credits: int) -> None:
        if self.state is StreamState.OPEN:
            self._connection.grant(self.stream_id, credits)
