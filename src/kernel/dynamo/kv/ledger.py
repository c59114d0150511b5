"""What one publisher has published of its blocks, so that it can answer queries and publishes nothing twice.

The answers to questions are the native ones to the letter: `Events` where the requested events are still there, `TreeDump`
(every block held now, parents first, numbered afresh) where they are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from dynamo.kv.changes import BlockChange, BlockRecord, PublishedEvent, StoredBlocks

MAX_EVENTS: Final = 4096
MAX_BLOCKS: Final = (
    1_000_000  # of 64 bytes and more: beyond it a dump is incomplete, which costs cache hits and no answer
)
MAX_BLOCKS_PER_EVENT: Final = 128

Wrap = Callable[[int, str, BlockChange], PublishedEvent]
"""(event id, storage tier, data) -> the event as it is published."""


class _Block:
    __slots__ = ("block", "count", "parent")

    def __init__(self, block: BlockRecord, parent: int | None) -> None:
        self.block = block
        self.parent = parent
        self.count = 1  # how often the engine stored it


class KvLedger:
    """The blocks and the last events of one data-parallel rank. Not thread-safe."""

    def __init__(self, wrap: Wrap, *, max_events: int = MAX_EVENTS, max_blocks: int = MAX_BLOCKS) -> None:
        self._wrap = wrap
        self._events: deque[PublishedEvent] = deque(maxlen=max_events)
        self._next_id = 1  # a last id of 0 in an answer means that nothing was published yet
        self._tiers: dict[str, dict[int, _Block]] = {}
        self._blocks = 0
        self._max_blocks = max_blocks

    @property
    def blocks(self) -> int:
        """How many blocks are known."""
        return self._blocks

    @property
    def last_event(self) -> PublishedEvent | None:
        """The newest event; None: there was none."""
        return self._events[-1] if self._events else None

    def add(self, tier: str, data: BlockChange) -> PublishedEvent | None:
        """Book one change and return it as an event to publish; None when there is nothing to publish.

        A block that was stored several times is removed when it was removed as often.
        """
        if data == "cleared":
            self._tiers.clear()
            self._blocks = 0
        elif "stored" in data:
            self._store(tier, data["stored"])
        else:
            hashes = data["removed"]["block_hashes"]
            gone = [block_hash for block_hash in hashes if self._remove(tier, block_hash)]
            if hashes and not gone:
                return None
            data = {"removed": {"block_hashes": gone}}
        event = self._wrap(self._next_id, tier, data)
        self._next_id += 1
        self._events.append(event)
        return event

    def _store(self, tier: str, stored: StoredBlocks) -> None:
        held = self._tiers.setdefault(tier, {})
        parent = stored["parent_hash"]
        for block in stored["blocks"]:
            block_hash = block["block_hash"]
            known = held.get(block_hash)
            if known is not None:
                known.count += 1
            elif self._blocks < self._max_blocks:
                held[block_hash] = _Block(block, parent)
                self._blocks += 1
            parent = block_hash

    def _remove(self, tier: str, block_hash: int) -> bool:
        """Remove a block; return whether routers should forget the block."""
        held = self._tiers.get(tier, {})
        known = held.get(block_hash)
        if known is None:
            return True  # stored before our time, or beyond what we track: let routers judge
        known.count -= 1
        if known.count:
            return False
        del held[block_hash]
        self._blocks -= 1
        return True

    # -- questions ---------------------------------------------------------------------------------------------------

    def answer(self, start: int | None, end: int | None) -> dict[str, object]:
        """Return the events from `start` on, or a dump (`start` None or too old). `end`: the last event known to the caller."""
        newest = self._next_id - 1
        if start is None:
            return self._dump()
        if end is not None and start > end:
            return {"InvalidRange": {"start_id": start, "end_id": end}}
        if start > newest:
            upto = newest if end is None else end
            return {
                "TooNew": {
                    "requested_start": start,
                    "requested_end": upto,
                    "newest_available": newest,
                }
            }
        oldest = self._next_id - len(self._events)
        if start < oldest:
            return self._dump()
        events = [event for event in self._events if event["event"]["event_id"] >= start]
        return {"Events": {"events": events, "last_event_id": newest}}

    def _dump(self) -> dict[str, object]:
        events = [self._wrap(number, tier, data) for number, (tier, data) in enumerate(self._runs())]
        return {"TreeDump": {"events": events, "last_event_id": self._next_id - 1, "reset_scope": "all"}}

    def _runs(self) -> Iterator[tuple[str, BlockChange]]:
        """Yield every block once, in runs without a branch, each after its parent."""
        for tier, held in self._tiers.items():
            children: dict[int | None, list[int]] = {}
            for block_hash, entry in held.items():
                parent = entry.parent if entry.parent in held else None
                children.setdefault(parent, []).append(block_hash)
            waiting = deque(children.get(None, ()))
            while waiting:
                run = [waiting.popleft()]
                after = children.get(run[-1], [])
                while len(after) == 1 and len(run) < MAX_BLOCKS_PER_EVENT:
                    run.append(after[0])
                    after = children.get(run[-1], [])
                waiting.extend(after)
                blocks = [held[block_hash].block for block_hash in run]
                yield tier, {"stored": {"parent_hash": held[run[0]].parent, "start_position": None, "blocks": blocks}}
