"""The caller's end of `mux` streams: one of them, and what hands out the items that arrive for all of one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from dynamo.runtime.calls.request_plane.base import END_INDEX, INITIAL_CREDITS, StreamItem, TokenLane
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


class InboundStreams:
    """The open streams of a connection, by id."""

    __slots__ = ("_loop", "idle_since", "lanes", "streams", "touched")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.streams: dict[int, MuxStream] = {}
        self.idle_since = self._loop.time()  # of `streams`, while there are none
        self.touched: list[MuxStream] = []  # their listeners are to be called
        self.lanes: list[MuxStream] = []  # these have token ids to pass on

    def on_step(self, stream_ids: list[int], offsets: list[int], token_ids: list[int], now: float) -> None:
        """Hand out one token for each of many streams: the hottest loop of a frontend. `now` is loop time."""
        find, grant_at = self.streams.get, MuxStream.GRANT_AT
        streams: list[MuxStream] = []
        lanes: list[TokenLane] = []
        ids: list[int] = []
        others: list[StreamItem] = []
        for stream_id, offset, token_id in zip(stream_ids, offsets, token_ids, strict=True):
            stream = find(stream_id)
            if stream is None:
                continue
            lane = stream.lane
            if lane is None or offset != stream.next_offset or stream.items or stream.lane_ids is not None:
                others.append(StreamItem(stream_id, 0, offset, [token_id]))
                continue
            stream.next_offset = offset + 1
            stream.consumed += 1
            if stream.consumed >= grant_at:
                stream.renew_credit()
            streams.append(stream)
            lanes.append(lane)
            ids.append(token_id)
        if lanes:
            for place in _take_step(lanes, ids, now):
                self._pass_token(streams[place], lanes[place], ids[place], now)
        if others:
            self.on_items(others)

    def _pass_token(self, stream: MuxStream, lane: TokenLane, token_id: int, now: float) -> None:
        """Pass on an id that was counted as passed on to `lane`."""
        if stream.lane is not lane:  # its reader has left because of what the same frame brought for another stream
            stream.lane_ids = [token_id]
            stream.pass_tokens()
            return
        try:
            if lane.take_token(token_id, now):
                return
        except BaseException as error:
            stream.close_lane(error)
        else:
            stream.close_lane(None)

    def on_items(self, items: list[StreamItem]) -> None:
        """Hand out items of any streams. Raises ProtocolError."""
        find, touched, lanes = self.streams.get, self.touched, self.lanes
        for item in items:
            stream = find(item.stream_id)
            if stream is None:
                continue
            if (
                stream.lane is not None
                and item.index == 0
                and item.finish_reason is None
                and item.extra is None
                and item.offset == stream.next_offset
                and not stream.items
            ):  # nearly every token: it is counted here, and passed on with what else came for its stream
                ids = item.token_ids
                stream.next_offset += len(ids)
                stream.consumed += len(ids) or 1
                if stream.lane_ids is None:
                    stream.lane_ids = ids
                    lanes.append(stream)
                else:
                    stream.lane_ids += ids
                continue
            if stream.lane_ids is not None:
                stream.pass_tokens()
            if item.index == END_INDEX:
                self.forget(item.stream_id)
                stream.end_with(item)
            elif stream.listener is not None:  # `deliver`, without the call: nearly every token
                items = stream.items
                items.append(item)
                if not stream.touched:
                    stream.touched = True
                    touched.append(stream)
                elif len(items) > MAX_BUFFERED_ITEMS:
                    raise ProtocolError(f"stream {item.stream_id} was sent more than its credit allows")
            else:
                stream.deliver(item)

    def on_piece(self, stream_id: int, payload: bytes, *, is_last: bool) -> None:
        """Take a piece of an item too large for one frame. Raises ProtocolError."""
        stream = self.streams.get(stream_id)
        item = stream.assemble(payload, is_last) if stream is not None else None
        if stream is not None and item is not None:
            if item.index == END_INDEX:
                self.forget(stream_id)
            stream.deliver(item)

    def hand_out(self) -> None:
        """Let the readers take what the frames of one read have brought."""
        if self.lanes:
            lanes, self.lanes = self.lanes, []
            for stream in lanes:
                stream.pass_tokens()
        if self.touched:
            self._call_listeners()

    def touch(self, stream: MuxStream) -> None:
        """Call this stream's listener: when everything that has arrived is handed out, or in the next turn of the loop."""
        if not stream.touched:
            stream.touched = True
            self.touched.append(stream)
            self._loop.call_soon(self._call_listeners)

    def _call_listeners(self) -> None:
        """Let every stream that got something notify its reader; each once, however much it got."""
        touched, self.touched = self.touched, []
        ended = StreamState.ENDED
        for stream in touched:
            stream.touched = False
            if stream.listener is not None:  # the reader may have left by now
                stream.listener()
                if stream.state is ended and stream.listener is not None:  # the end came together with what it took
                    stream.listener()

    def forget(self, stream_id: int) -> None:
        """Let go of a stream: what still arrives for it is ignored."""
        self.streams.pop(stream_id, None)
        if not self.streams:
            self.idle_since = self._loop.time()


def _take_step(lanes: list[TokenLane], ids: list[int], now: float) -> Iterable[int]:
    """Let lanes of one kind take their ids together; return the places of the ids that were not taken, in order."""
    take = getattr(lanes[0], "take_step", None)
    if take is None or len(set(map(type, lanes))) > 1 or len(set(map(id, lanes))) < len(lanes):
        return range(len(lanes))
    places: Iterable[int] = take(lanes, ids, now)
    return places
