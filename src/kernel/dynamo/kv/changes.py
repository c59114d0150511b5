"""The changes of KV blocks in their published shape: what a worker writes, and a router reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict, final


class MediaObject(TypedDict):
    """One image, video or sound inside a block."""

    mm_hash: int
    offsets: Sequence[object]


class MediaInfo(TypedDict):
    """The media of one block."""

    mm_objects: Sequence[MediaObject]


class BlockRecord(TypedDict):
    """One block."""

    block_hash: int  # the engine's own name
    tokens_hash: int
    mm_extra_info: NotRequired[MediaInfo | None]


class StoredBlocks(TypedDict):
    """Blocks that follow each other and `parent_hash`."""

    parent_hash: int | None
    start_position: NotRequired[int | None]
    blocks: Sequence[BlockRecord]


class RemovedBlocks(TypedDict):
    """Blocks by their engine's names."""

    block_hashes: Sequence[int]


@final
class StoredChange(TypedDict):
    """The engine holds more blocks."""

    stored: StoredBlocks


@final
class RemovedChange(TypedDict):
    """The engine no longer holds these blocks."""

    removed: RemovedBlocks


BlockChange: TypeAlias = StoredChange | RemovedChange | Literal["cleared"]


class NumberedChange(TypedDict):
    """A change of one rank; the numbers count up, and a gap is a loss."""

    event_id: int
    data: BlockChange
    dp_rank: int


class PublishedEvent(TypedDict):
    """A change, and whose it is."""

    worker_id: int
    storage_tier: str
    residency_domain: NotRequired[str]
    event: NumberedChange
