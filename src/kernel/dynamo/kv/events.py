"""KV events as routers read them: one change of the blocks of one rank of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

# A worker of 1.6.1 and ours put at most 128 events or 8,192 blocks into a message. What is beyond these bounds is refused
# unread: decoding a million blocks takes 0.2 s, in which nothing else runs.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024  # even what is skipped in it takes 10 ms at most
MAX_EVENTS: Final = 1_024  # of one message
MAX_EVENT_BYTES: Final = 1024 * 1024
MAX_EVENT_BLOCKS: Final = 8_192
MAX_EVENT_ID: Final = 2**63 - 1
PIECE_BLOCKS: Final = 2_048  # of an event in a worker's answer that are applied at once


class BadEvents(ValueError):
    """A message holds no valid KV events; holds the reason."""


class HeldBlock(msgspec.Struct, frozen=True, gc=False):
    """One block."""

    block_hash: int  # the engine's own name, which parents and removals refer to
    tokens_hash: int  # of its tokens alone


class BlocksAdded(msgspec.Struct, frozen=True, gc=False):
    """The rank holds these blocks, which follow each other and `parent_hash`."""

    blocks: list[HeldBlock]
    parent_hash: int | None = None  # None: the first block begins a sequence
    start_position: int | None = None


class BlocksDropped(msgspec.Struct, frozen=True, gc=False):
    """The rank no longer holds these blocks."""

    block_hashes: list[int]


class BlockUpdate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One member is set, and names the kind of the change."""

    stored: BlocksAdded | None = None
    removed: BlocksDropped | None = None


class KvChange(msgspec.Struct, frozen=True, gc=False):
    """`data` "cleared": the rank holds nothing any more (see docs/events.md)."""

    event_id: int  # counts up for each rank; a gap is a loss
    data: BlockUpdate | Literal["cleared"]
    dp_rank: int = 0


class RouterEvent(msgspec.Struct, frozen=True, gc=False):
    """A change, and whose it is. Unknown members are ignored."""

    worker_id: int
    event: KvChange
    storage_tier: str = "device"  # device, host_pinned, disk, external
    residency_domain: str | msgspec.UnsetType | None = msgspec.UNSET  # absent in the events of old publishers


class KvAnswer(msgspec.Struct, frozen=True):
    """A worker's answer to a query for missed events."""

    kind: str  # "Events", "TreeDump", "TooNew", "InvalidRange", "Error"
    events: list[object] = []  # to be read one by one with `read_answered`: there may be a rank's whole cache
    last_event_id: int = 0  # of a TooNew: the newest there is; -1: not reported
    text: str = ""  # of an Error


class _Body(msgspec.Struct):
    events: list[object]
    last_event_id: int


class _TooNew(msgspec.Struct):
    newest_available: int = -1


_EVENT: Final = msgspec.msgpack.Decoder(RouterEvent)
_RAW_EVENTS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_UNREADABLE: Final = (
    msgspec.MsgspecError,
    ValueError,
    RecursionError,
    OverflowError,
)  # also no UTF-8, or nested too deep


def split_events(payload: bytes) -> list[msgspec.Raw]:
    """Return the events of one message, each to be read with `read_event`. Raises BadEvents."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadEvents(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    count = _array_size(payload)
    if count is None:
        return [msgspec.Raw(payload)]
    if count > MAX_EVENTS:
        raise BadEvents(f"a message of {count} events; at most {MAX_EVENTS} are read")
    try:
        return _RAW_EVENTS.decode(payload)
    except _UNREADABLE as error:
        raise BadEvents(str(error)) from error


def read_event(part: msgspec.Raw) -> RouterEvent:
    """Decode one event of a message. Raises BadEvents."""
    size = memoryview(part).nbytes
    if size > MAX_EVENT_BYTES:
        raise BadEvents(f"an event of {size} bytes; at most {MAX_EVENT_BYTES} are read")
    try:
        event = _EVENT.decode(part)
    except _UNREADABLE as error:
        raise BadEvents(str(error)) from error
    if blocks_of(event) > MAX_EVENT_BLOCKS:
        raise BadEvents(f"an event of {blocks_of(event)} blocks; at most {MAX_EVENT_BLOCKS} are taken")
    return _with_id_in_range(event)


def read_events(payload: bytes) -> list[RouterEvent]:
    """Decode all events of one message. Raises BadEvents."""
    return [read_event(part) for part in split_events(payload)]


def read_answer(item: object) -> KvAnswer:
    """Decode an answer, which is an object with one member, named by its kind. Raises BadEvents."""
    if not isinstance(item, dict) or len(item) != 1:
        raise BadEvents(f"expected an object with one member, got {type(item).__name__}")
    ((kind, body),) = item.items()
    try:
        if kind == "TooNew":
            return KvAnswer(kind, last_event_id=msgspec.convert(body, _TooNew).newest_available)
        if kind not in ("Events", "TreeDump"):
            return KvAnswer(str(kind), text=str(body)[:200])
        found = msgspec.convert(body, _Body)
    except _UNREADABLE as error:
        raise BadEvents(f"{kind}: {error}") from error
    if not 0 <= found.last_event_id <= MAX_EVENT_ID:
        raise BadEvents(f"{kind}: last_event_id must be between 0 and {MAX_EVENT_ID}, got {found.last_event_id}")
    return KvAnswer(kind, found.events, found.last_event_id)


def read_answered(event: object) -> RouterEvent:
    """Return one event of an answer. Raises BadEvents."""
    try:
        return _with_id_in_range(msgspec.convert(event, RouterEvent))
    except _UNREADABLE as error:
        raise BadEvents(str(error)) from error


def blocks_of(event: RouterEvent) -> int:
    """Return how many blocks an event names."""
    data = event.event.data
    if isinstance(data, str):
        return 0
    stored, removed = data.stored, data.removed
    return (0 if stored is None else len(stored.blocks)) + (0 if removed is None else len(removed.block_hashes))


def pieces_of(event: RouterEvent) -> Iterator[RouterEvent]:
    """Yield events of at most `PIECE_BLOCKS` blocks that together equal a long one."""
    data = event.event.data
    if isinstance(data, str) or blocks_of(event) <= PIECE_BLOCKS:
        yield event
        return
    if data.stored is not None:
        blocks, parent = data.stored.blocks, data.stored.parent_hash
        for at in range(0, len(blocks), PIECE_BLOCKS):
            piece = BlocksAdded(blocks[at : at + PIECE_BLOCKS], parent)
            yield _with_data(event, BlockUpdate(stored=piece))
            parent = piece.blocks[-1].block_hash
    if data.removed is not None:
        names = data.removed.block_hashes
        for at in range(0, len(names), PIECE_BLOCKS):
            yield _with_data(event, BlockUpdate(removed=BlocksDropped(names[at : at + PIECE_BLOCKS])))


def _with_id_in_range(event: RouterEvent) -> RouterEvent:
    event_id = event.event.event_id
    if not 0 <= event_id <= MAX_EVENT_ID:
        raise BadEvents(f"event_id must be between 0 and {MAX_EVENT_ID}, got {event_id}")
    return event


def _with_data(event: RouterEvent, data: BlockUpdate) -> RouterEvent:
    return msgspec.structs.replace(event, event=msgspec.structs.replace(event.event, data=data))


def _array_size(payload: bytes) -> int | None:
    """Return the length of the msgpack array that a message is, by its header; None: it is no array."""
    head = payload[:1]
    if b"\x90" <= head <= b"\x9f":
        return head[0] - 0x90
    if head == b"\xdc":
        return int.from_bytes(payload[1:3], "big")
    return int.from_bytes(payload[1:5], "big") if head == b"\xdd" else None
