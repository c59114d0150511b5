"""The KV cache the sample engine pretends to have, and the thread that reports it to the router.

Real engines report their cache from a thread of their own; so does this one. It also shows the two rules of such a
thread: a failure to publish is logged and survived, and it has ended when `cleanup()` returns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dynamo.contract.kv_events import ComponentSnapshot
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, SnapshotPublisher

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 16
TOTAL_BLOCKS: Final = 1000
TICK_SECONDS: Final = 0.1  # how often the load is reported while nothing changes
JOIN_SECONDS: Final = 1.0
MAX_WAITING: Final = 10_000  # changes; past it the newest is dropped, as an at-most-once event may be


@dataclass(frozen=True)
class _Stored:
    token_ids: Sequence[int]
    block_hashes: list[int]


@dataclass(frozen=True)
class _Removed:
    block_hashes: list[int]


_Change = _Stored | _Removed | None  # None: wake up and check whether to stop


class SampleKvCache:
    """Blocks held by running requests. Silent, and without a thread, until a publisher is attached."""

    def __init__(self) -> None:
        self._events: KvEventPublisher | None = None
        self._snapshots: SnapshotPublisher | None = None
        self._changes: queue.Queue[_Change] = queue.Queue(MAX_WAITING)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_hash = itertools.count(1)
        self._used = 0  # blocks; touched by the event loop only, read by the thread

    def attach_events(self, publisher: KvEventPublisher) -> None:
        self._events = publisher
        self._run()

    def attach_snapshots(self, publisher: SnapshotPublisher) -> None:
        self._snapshots = publisher
        self._run()

    @contextmanager
    def blocks_of(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Hold the blocks of one prompt, at least one, while the request runs."""
        hashes = [next(self._next_hash) for _ in range(max(1, len(token_ids) // BLOCK_TOKENS))]
        self._used += len(hashes)
        self._put_change(_Stored(token_ids, hashes))
        try:
            yield
        finally:
            self._used -= len(hashes)
            self._put_change(_Removed(hashes))

    async def close(self) -> None:
        """End the thread, waiting a moment for it. Safe twice, and without a thread."""
        self._stop.set()
        self._put_change(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def _run(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish_loop, name="sample-kv-publisher", daemon=True)
            self._thread.start()

    def _put_change(self, change: _Change) -> None:
        if self._thread is None:
            return
        try:
            self._changes.put_nowait(change)
        except queue.Full:
            logger.debug("sample KV change dropped: the publishing thread is %d changes behind", MAX_WAITING)

    def _publish_loop(self) -> None:
        while not self._stop.is_set():
            try:
                change = self._changes.get(timeout=TICK_SECONDS)
            except queue.Empty:
                change = None
            try:
                self._publish(change)
            except Exception:  # the next change may well get through; without this thread none would
                logger.exception("sample KV publishing failed")

    def _publish(self, change: _Change) -> None:
        match change:
            case _Stored(token_ids, block_hashes) if self._events is not None:
                self._events.publish_stored(
                    _padded(token_ids, len(block_hashes)), [BLOCK_TOKENS] * len(block_hashes), block_hashes
                )
            case _Removed(block_hashes) if self._events is not None:
                self._events.publish_removed(block_hashes)
            case None if self._snapshots is not None:
                used = min(self._used, TOTAL_BLOCKS)  # there is no limit on the requests that run
                self._snapshots.publish(0, ComponentSnapshot(used, TOTAL_BLOCKS, used / TOTAL_BLOCKS, 0, None))


def _padded(token_ids: Sequence[int], blocks: int) -> list[int]:
    """Return the tokens of whole blocks; a prompt shorter than one block is filled up, because a block has a fixed size."""
    size = blocks * BLOCK_TOKENS
    whole = list(token_ids[:size])
    return whole + [0] * (size - len(whole))
