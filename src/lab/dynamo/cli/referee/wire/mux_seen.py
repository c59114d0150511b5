"""What came on a `mux` connection, as it came. No I/O.

The decoder is written from docs/wire.md and not from the one that callers of this package use: that one closes at the first
mistake, and this one has to name it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, demand
from dynamo.cli.referee.exchange import Json
from dynamo.runtime.calls.request_plane.base import END_INDEX, OBJECT_INDEX
from dynamo.runtime.calls.request_plane.mux.frames import END_FLAG, HEADER, Kind

MAX_ACCEPTED: Final = (
    4 << 20
)  # bytes of a frame that is read in spite of the limit, so that the check of it can name it
FINISH_REASONS: Final = frozenset({"stop", "eos", "length", "cancelled", "content_filter"})
ERROR_TYPES: Final = frozenset(
    {
        *("Unknown", "InvalidArgument", "CannotConnect", "Disconnected", "ConnectionTimeout", "ResponseTimeout"),
        *("Cancelled", "EngineShutdown", "StreamIncomplete", "WorkerOverloaded", "WorkerUnavailable"),
    }
)


class FrameHead(NamedTuple):
    """The header of a frame as it came."""

    length: int
    kind: int
    flags: int
    reserved: int
    stream_id: int


class SeenItem(NamedTuple):
    """One item of a stream."""

    choice: int
    offset: int
    token_ids: list[Json]
    finish_reason: Json = None
    extra: Json = None

    @property
    def cost(self) -> int:
        """Its credits."""
        return self.offset if self.choice == OBJECT_INDEX else max(1, len(self.token_ids))


@dataclass(slots=True)
class SeenStream:
    """What came of one stream."""

    granted: int
    items: list[SeenItem] = field(default_factory=list)
    end: SeenItem | None = None
    after_end: int = 0  # items that came behind the END
    spent: int = 0
    overrun: int = 0  # items that came without credit
    parts: int = 0  # frames of items that did not fit in one

    def take(self, item: SeenItem) -> None:
        """Take an item in its turn."""
        if self.end is not None:
            self.after_end += 1
        elif item.choice == END_INDEX:
            self.end = item
        else:
            self.overrun += self.spent >= self.granted
            self.spent += item.cost
            self.items.append(item)

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(item.token_ids) for item in self.items if item.choice >= 0)

    @property
    def failure(self) -> Json:
        """The error record of the END; None where there is none."""
        return None if self.end is None else self.end.extra

    def demand_clean(self) -> None:
        """Demand an END without an error. A worker without room cannot be judged."""
        if error_type(self.failure) == "WorkerOverloaded":
            raise CannotJudge(f"the worker has no room: {self.failure!r:.200}", Cause.SERVER)
        demand(self.failure is None, f"the request ended with the error {self.failure!r:.300}")

    def demand_whole(self) -> None:
        """Raise Broken unless every token came, once and in order."""
        self.demand_clean()
        self.demand_offsets()
        total = None if self.end is None else self.end.offset
        demand(total == self.tokens, f"END counts {total} tokens, and {self.tokens} came")

    def demand_offsets(self) -> None:
        """Raise Broken where the offsets of a choice have a gap or an overlap."""
        expected: dict[int, int] = defaultdict(int)
        for item in self.items:
            if item.choice >= 0:
                right = expected[item.choice]
                demand(item.offset == right, f"a chunk of choice {item.choice} has offset {item.offset}, not {right}")
                expected[item.choice] += len(item.token_ids)


class SeenFrames:
    """Everything that came on one connection. No I/O."""

    def __init__(self) -> None:
        self.heads: list[FrameHead] = []
        self.streams: dict[int, SeenStream] = {}
        self.hello: Json = None
        self.pongs: list[bytes] = []
        self.error: str | None = None
        self.steps = 0
        self._parts: dict[int, bytearray] = {}
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameHead, bytes]]:
        """Take bytes, and return the frames that they complete. Raises Broken where they are none."""
        self._buffer += data
        found = []
        while len(self._buffer) >= HEADER.size:
            head = FrameHead(*HEADER.unpack_from(self._buffer))
            demand(
                head.length <= MAX_ACCEPTED, f"a frame of {head.length} bytes came: {bytes(self._buffer[:24]).hex(' ')}"
            )
            end = HEADER.size + head.length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            self.heads.append(head)
            found.append((head, payload))
            self._take(head, payload)
        return found

    def _take(self, head: FrameHead, payload: bytes) -> None:
        match head.kind:
            case Kind.HELLO:
                self.hello = decoded(payload, "HELLO")
            case Kind.PONG:
                self.pongs.append(payload)
            case Kind.ERROR:
                record = decoded(payload, "ERROR")
                self.error = str(record.get("message")) if isinstance(record, dict) else repr(record)
            case Kind.ITEMS:
                items = decoded(payload, "ITEMS")
                demand(isinstance(items, list), f"ITEMS carries no array: {items!r:.100}")
                for item in items:
                    self._item(item)
            case Kind.ITEM_PART:
                self._part(head, payload)
            case Kind.STEP:
                self._step(decoded(payload, "STEP"))

    def _item(self, raw: Json) -> int:
        is_right = isinstance(raw, list) and 3 <= len(raw) <= 6 and all(type(member) is int for member in raw[:3])
        demand(is_right, f"an item is not [stream id, index, offset, token_ids, ...]: {raw!r:.200}")
        demand(len(raw) < 4 or isinstance(raw[3], list), f"the token_ids of an item are no array: {raw!r:.200}")
        self.stream(raw[0]).take(SeenItem(raw[1], raw[2], *(raw[3:] or [[]])))
        return int(raw[0])

    def _part(self, head: FrameHead, payload: bytes) -> None:
        part = self._parts.setdefault(head.stream_id, bytearray())
        part += payload
        self.stream(head.stream_id).parts += 1
        if head.flags & END_FLAG:
            stream_id = self._item(decoded(bytes(self._parts.pop(head.stream_id)), "an item in parts"))
            demand(stream_id == head.stream_id, f"the parts of stream {head.stream_id} are an item of {stream_id}")

    def _step(self, columns: Json) -> None:
        is_right = isinstance(columns, list) and len(columns) == 3 and all(isinstance(one, list) for one in columns)
        demand(is_right, f"STEP is not three columns: {columns!r:.200}")
        ids, offsets, tokens = columns
        demand(len(ids) == len(offsets) == len(tokens), f"the columns of a STEP differ in length: {columns!r:.200}")
        demand(len(set(ids)) == len(ids), f"a stream is twice in one STEP: {ids!r:.200}")
        self.steps += 1
        for stream_id, offset, token in zip(ids, offsets, tokens, strict=True):
            self._item([stream_id, 0, offset, [token]])

    def stream(self, stream_id: int) -> SeenStream:
        """Return a stream that was opened. Raises Broken for another one."""
        found = self.streams.get(stream_id)
        if found is None:
            raise Broken(f"an item of stream {stream_id} came, which was not opened on this connection")
        return found


def error_type(record: Json) -> str:
    """Return the name of an error record's type, "" where it has none."""
    kind = record.get("error_type") if isinstance(record, dict) else None
    if isinstance(kind, dict) and set(kind) == {"Backend"}:
        kind = kind["Backend"]
    return kind if isinstance(kind, str) else ""


def decoded(payload: bytes, what: str) -> Json:
    """Return what a frame carries. Raises Broken where it is not msgpack."""
    try:
        return msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Broken(f"{what} is not msgpack ({error}): {payload[:40].hex(' ')}") from error
