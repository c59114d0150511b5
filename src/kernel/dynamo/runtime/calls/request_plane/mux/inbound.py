"""What arrives on one `mux` connection of a caller: the items of each frame are handed out to the streams.

The hottest code of a frontend. While the frames of one read are handed out, a stream that has a lane gets its token ids there;
the listener of any other stream is called once, at the end, however many items the stream got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from dynamo.runtime.calls.request_plane.base import END_INDEX, StreamItem, TokenLane
from dynamo.runtime.calls.request_plane.mux.frames import ProtocolError
from dynamo.runtime.calls.request_plane.mux.stream import MAX_BUFFERED_ITEMS, MuxStream
from dynamo.runtime.calls.request_plane.stream import StreamState


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
