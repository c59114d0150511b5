"""KV events as routers read them: one change of the blocks of one rank of one worker."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = [
    "BadEvents",
    "BlockUpdate",
    "BlocksAdded",
    "BlocksDropped",
    "HeldBlock",
    "KvAnswer",
    "KvChange",
    "RouterEvent",
    "read_answer",
    "read_events",
]


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
    events: list[RouterEvent] = []
    last_event_id: int = 0
    text: str = ""  # of an Error


class _Body(msgspec.Struct):
    events: list[RouterEvent]
    last_event_id: int


_EVENTS: Final = msgspec.msgpack.Decoder(list[RouterEvent] | RouterEvent)


def read_events(payload: bytes) -> list[RouterEvent]:
    """Decode the events of one message. Raises BadEvents."""
    try:
        found = _EVENTS.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadEvents(str(error)) from error
    return found if isinstance(found, list) else [found]


def read_answer(item: object) -> KvAnswer:
    """Decode an answer, which is an object with one member, named by its kind. Raises BadEvents."""
    if not isinstance(item, dict) or len(item) != 1:
        raise BadEvents(f"expected an object with one member, got {type(item).__name__}")
    ((kind, body),) = item.items()
    if kind not in ("Events", "TreeDump"):
        return KvAnswer(str(kind), text=str(body))
    try:
        found = msgspec.convert(body, _Body)
    except msgspec.ValidationError as error:
        raise BadEvents(f"{kind}: {error}") from error
    return KvAnswer(kind, found.events, found.last_event_id)
