"""What one worker of a replay publishes of its cache, and keeps for routers that lost some of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from dynamo.kv.events import BlocksAdded, BlocksDropped, BlockUpdate, HeldBlock, KvChange, RouterEvent
from dynamo.scheduling import BlockRun, EvictedBlocks

__all__ = ["EventJournal"]

KEPT_EVENTS: Final = 1024  # as native workers keep
MAX_DUMP_RUN: Final = 128  # blocks of one event of a dump


class EventJournal:
    """Numbers the events of one worker; with `keeps_blocks` it can also answer routers that missed some."""

    __slots__ = ("_blocks", "_events", "_keeps_blocks", "_worker_id", "last_event_id")

    def __init__(self, worker_id: int, *, keeps_blocks: bool) -> None:
        self.last_event_id = 0
        self._worker_id = worker_id
        self._keeps_blocks = keeps_blocks
        self._events: deque[RouterEvent] = deque(maxlen=KEPT_EVENTS)
        self._blocks: dict[int, tuple[int | None, int]] = {}  # sequence hash -> (the one before, the block's own hash)

    def record(self, change: BlockRun | EvictedBlocks) -> RouterEvent:
        """Return a change of the cache as routers read it."""
        self.last_event_id += 1
        if isinstance(change, EvictedBlocks):
            data = BlockUpdate(removed=BlocksDropped(change.identities))
        else:
            data = _stored(change.parent, change.identities, change.content)
        event = RouterEvent(self._worker_id, KvChange(self.last_event_id, data))
        if self._keeps_blocks:
            self._events.append(event)
            if isinstance(change, EvictedBlocks):
                for block in change.identities:
                    del self._blocks[block]
            else:
                parent = change.parent
                for block, own in zip(change.identities, change.content, strict=True):
                    self._blocks[block] = parent, own
                    parent = block
        return event

    def events_since(self, event_id: int) -> list[RouterEvent] | None:
        """Return the events from `event_id` on; None where the first of them is kept no more."""
        if event_id > self.last_event_id:
            return []
        if not self._events or self._events[0].event.event_id > event_id:
            return None
        return [event for event in self._events if event.event.event_id >= event_id]

    def dump(self) -> Iterator[RouterEvent]:
        """Yield all blocks that the worker holds, parents first, numbered afresh from 0."""
        run: list[tuple[int, int]] = []
        parent: int | None = None
        number = 0
        for block, (before, own) in self._blocks.items():
            if run and (run[-1][0] != before or len(run) >= MAX_DUMP_RUN):
                yield self._dumped(number, parent, run)
                number, run = number + 1, []
            if not run:
                parent = before
            run.append((block, own))
        if run:
            yield self._dumped(number, parent, run)

    def _dumped(self, number: int, parent: int | None, run: list[tuple[int, int]]) -> RouterEvent:
        data = _stored(parent, [block for block, _ in run], [own for _, own in run])
        return RouterEvent(self._worker_id, KvChange(number, data))


def _stored(parent: int | None, identities: list[int], content: list[int]) -> BlockUpdate:
    """Return blocks that follow each other as an event names them."""
    blocks = [HeldBlock(block, own) for block, own in zip(identities, content, strict=True)]
    return BlockUpdate(stored=BlocksAdded(blocks, parent))
