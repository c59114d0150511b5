"""Publishes to routers which KV blocks an engine holds, and which it gave up.

Every `publish...` may be called from any thread, returns at once and never waits for the network: messages go through
a bounded outbox that the worker's event loop empties. Delivery is at most once; a lost KV event leaves a gap in the
event ids, which routers notice.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, assert_never, cast

from msgspec import Struct

from dynamo.contract.kv_events import ComponentSnapshot, KvEventSource, PushSource, ZmqSource
from dynamo.errors import InvalidArgument
from dynamo.kv.changes import BlockChange, BlockRecord, MediaInfo, PublishedEvent
from dynamo.kv.engine_events import Cleared, EngineEvent, Removed, Stored
from dynamo.kv.hashing import block_hashes as hash_blocks
from dynamo.kv.hashing import to_unsigned
from dynamo.kv.ledger import KvLedger
from dynamo.kv.media_routing import padded_blocks
from dynamo.kv.overlap import WorkerRank
from dynamo.runtime.base.timers import due_of
from dynamo.worker.kv_publishing.load import SnapshotPublisher, WorkerMetricsPublisher
from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics
from dynamo.worker.kv_publishing.outbox import EventChannel, Outbox

if TYPE_CHECKING:
    from dynamo.worker.kv_publishing.recovery import BackgroundRecovery
    from dynamo.worker.kv_publishing.zmq_source import ZmqEngineEvents

__all__ = [
    "ComponentSnapshot",
    "KvEventPublisher",
    "KvEventSource",
    "PushSource",
    "SnapshotPublisher",
    "WorkerMetricsPublisher",
    "ZmqSource",
]

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = (0.2, 0.3, 0.4, 10.0)
"""The pauses before each repetition; the last one again and again, for routers that could not be reached meanwhile."""


class LastEventRepeats:
    """Publishes again when nothing new was published for a while. Use it on one event loop."""

    __slots__ = ("_is_closed", "_loop", "_publish", "_sent_at", "_step", "_timer")

    def __init__(self, publish: Callable[[], None]) -> None:
        """`publish`: publishes the last event once more."""
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._step = 0
        self._is_closed = False

    def sent(self) -> None:
        """Begin the silence behind events that were published just now."""
        self._sent_at, self._step = self._loop.time(), 0
        if self._timer is None or due_of(self._timer) > self._sent_at + REPEAT_SECONDS[0]:
            self._set_timer()

    def close(self) -> None:
        """Publish nothing more. Idempotent."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self._timer = self._loop.call_at(self._sent_at + REPEAT_SECONDS[self._step], self._due)

    def _due(self) -> None:
        if self._loop.time() >= self._sent_at + REPEAT_SECONDS[self._step]:  # else there was something new meanwhile
            self._publish()
            self._sent_at = self._loop.time()
            self._step = min(self._step + 1, len(REPEAT_SECONDS) - 1)
        self._timer = None
        self._set_timer()


KV_EVENTS_TOPIC: Final = "kv-events"

MAX_EVENTS_PER_MESSAGE: Final = 128
MAX_BLOCKS_PER_EVENT: Final = 128
MAX_BATCHING_TIMEOUT_MS: Final = 15_000
MAX_SIZE_WARNINGS: Final = 3
DEVICE: Final = "device"  # the storage tier of an accelerator's own memory

TierChange = tuple[str, BlockChange]


class _StoredBlocks(Struct, frozen=True):
    """The arguments of `KvEventPublisher.publish_stored`."""

    token_ids: Sequence[int]
    num_block_tokens: Sequence[int]
    block_hashes: Sequence[int]
    parent_hash: int | None = None
    block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None
    lora_name: str | None = None
    is_eagle: bool = False
    cache_salt: str | None = None


class BlockHasher:
    """Makes of the blocks of an engine those that routers know: hashed, and of the size that the worker registered."""

    def __init__(self, block_size: int, placeholders: frozenset[int]) -> None:
        self._block_size, self._placeholders = block_size, placeholders
        self._size_warnings = 0

    def changes(self, blocks: _StoredBlocks) -> list[BlockChange]:
        """Return the changes to publish for blocks that an engine has stored. Raises ValueError."""
        token_ids, num_block_tokens, is_eagle = blocks.token_ids, blocks.num_block_tokens, blocks.is_eagle
        block_mm_infos, count = blocks.block_mm_infos, len(blocks.block_hashes)
        if len(num_block_tokens) != count:
            raise ValueError(f"{count} block_hashes but {len(num_block_tokens)} num_block_tokens")
        if block_mm_infos is not None and len(block_mm_infos) != count:
            raise ValueError(f"{count} block_hashes but {len(block_mm_infos)} block_mm_infos")
        if sum(num_block_tokens) + is_eagle > len(token_ids):
            raise ValueError(f"the blocks need {sum(num_block_tokens) + is_eagle} token_ids, got {len(token_ids)}")
        names = [to_unsigned(name) for name in blocks.block_hashes]
        parent = None if blocks.parent_hash is None else to_unsigned(blocks.parent_hash)
        whole = self._whole_blocks(num_block_tokens)
        media = {n: info for n, info in enumerate(block_mm_infos or ()) if info}
        mm_hashes = {n: [entry["mm_hash"] for entry in info["mm_objects"]] for n, info in media.items()}
        hashed = token_ids[: whole * self._block_size + is_eagle]
        if mm_hashes and self._placeholders:
            hashed, mm_hashes = padded_blocks(hashed, self._block_size, self._placeholders, mm_hashes), {}
        local = hash_blocks(
            hashed,
            self._block_size,
            lora_name=blocks.lora_name,
            cache_salt=blocks.cache_salt,
            eagle=is_eagle,
            mm_hashes=mm_hashes,
        )
        entries: list[BlockRecord] = [
            {"block_hash": names[n], "tokens_hash": local[n], "mm_extra_info": cast("MediaInfo | None", media.get(n))}
            for n in range(whole)
        ]
        pieces: list[BlockChange] = []
        for start in range(0, whole, MAX_BLOCKS_PER_EVENT):
            piece = entries[start : start + MAX_BLOCKS_PER_EVENT]
            pieces.append({"stored": {"parent_hash": parent, "start_position": None, "blocks": piece}})
            parent = names[start + len(piece) - 1]
        return pieces

    def changes_of(self, events: Sequence[EngineEvent]) -> list[TierChange]:
        """Return an engine's own events as changes to publish, by tier. Raises ValueError."""
        changes: list[TierChange] = []
        for event in events:
            match event:
                case Stored():
                    blocks = _StoredBlocks(
                        event.token_ids,
                        [event.block_size] * len(event.block_hashes),
                        event.block_hashes,
                        parent_hash=event.parent,
                        block_mm_infos=event.mm_infos,
                        lora_name=event.lora_name,
                        is_eagle=event.is_eagle,
                        cache_salt=event.cache_salt,
                    )
                    changes += [(event.tier, change) for change in self.changes(blocks)]
                case Removed():
                    removed = _removed(event.block_hashes) or [{"removed": {"block_hashes": []}}]
                    changes += [(event.tier, change) for change in removed]
                case Cleared():
                    changes.append((DEVICE, "cleared"))
                case _:
                    assert_never(event)
        return changes

    def _whole_blocks(self, num_block_tokens: Sequence[int]) -> int:
        """Count the blocks that can be published: up to the first block of another size, on which the later blocks
        depend.
        """
        for number, tokens in enumerate(num_block_tokens):
            if tokens != self._block_size:
                if self._size_warnings < MAX_SIZE_WARNINGS:
                    self._size_warnings += 1
                    logger.warning(
                        "a KV block of %d tokens is not published: this worker registered blocks of %d",
                        tokens,
                        self._block_size,
                    )
                return number
        return len(num_block_tokens)


class KvEventPublisher:
    """Reports to routers which blocks one data-parallel rank of this worker holds."""

    def __init__(
        self,
        endpoint: Any,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        batching_timeout_ms: int | None = None,
        image_token_id: int | None = None,
        kv_state_endpoint: str | None = None,
        video_token_id: int | None = None,
        *,
        channel: EventChannel | None = None,
    ) -> None:
        """Create it on the worker's event loop. `channel` replaces the endpoint's own: a worker's, tests.

        With `enable_local_indexer` routers may request what they missed; with a `channel` that is its owner's to serve.

        With `zmq_endpoint` the events are those that the engine publishes there (`zmq_topic` "": all of them). Every list
        leaves at once, so `batching_timeout_ms` is only checked. Raises InvalidArgument for a block size below 1, a
        timeout above 15 s, and an address that is none.

        `image_token_id` and `video_token_id` stand in the engine's tokens in every place of an image or video. Blocks with
        media are then hashed with the pad tokens of their objects in these places, as routers hash the prompt. Without
        them the hashes of the objects are appended to each block.
        """
        if kv_block_size < 1:
            raise InvalidArgument(f"kv_block_size must be at least 1, got {kv_block_size}")
        if batching_timeout_ms is not None and not 0 <= batching_timeout_ms <= MAX_BATCHING_TIMEOUT_MS:
            raise InvalidArgument(
                f"batching_timeout_ms must be in 0..{MAX_BATCHING_TIMEOUT_MS}, got {batching_timeout_ms}"
            )
        self._rank = WorkerRank(endpoint.connection_id() if worker_id is None else worker_id, dp_rank)
        own_channel: Any = endpoint.event_channel(KV_EVENTS_TOPIC) if channel is None else None
        self._channel: EventChannel = own_channel if channel is None else channel
        self._repeats = LastEventRepeats(self._publish_last)
        self._outbox = Outbox(self._channel, on_sent=self._repeats.sent)
        self._lock = threading.Lock()  # holds the order of event ids and messages together
        self._ledger = KvLedger(self._envelope)
        placeholders = frozenset(each for each in (image_token_id, video_token_id) if each is not None)
        self._hasher = BlockHasher(kv_block_size, placeholders)
        self._engine: ZmqEngineEvents | None = None
        self._recovery: BackgroundRecovery | None = None
        if own_channel is not None and enable_local_indexer:
            from dynamo.worker.kv_publishing.recovery import BackgroundRecovery

            self._recovery = BackgroundRecovery(endpoint, self, own_channel.publisher_id)
        if zmq_endpoint is not None:
            from dynamo.worker.kv_publishing.zmq_source import ZmqEngineEvents

            metrics = KvPublisherMetrics(endpoint.runtime.metrics)
            self._engine = ZmqEngineEvents(zmq_endpoint, zmq_topic or "", self.take_engine_events, metrics)

    @property
    def dropped_messages(self) -> int:
        """Messages lost because the event loop was busy for too long."""
        return self._outbox.dropped

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Publish blocks that the engine now holds, which follow each other and `parent_hash`.

        `token_ids` are the tokens of all blocks in a row (with `is_eagle` one more: the token after them);
        `num_block_tokens` counts those of each block; `block_hashes` are the engine's own names, signed or unsigned 64
        bits. Raises ValueError when the three do not fit together.
        """
        self._send(
            self._hasher.changes(
                _StoredBlocks(
                    token_ids,
                    num_block_tokens,
                    block_hashes,
                    parent_hash=parent_hash,
                    block_mm_infos=block_mm_infos,
                    lora_name=lora_name,
                    is_eagle=bool(is_eagle),
                    cache_salt=cache_salt,
                )
            )
        )

    def publish_removed(self, block_hashes: Sequence[int]) -> None:
        """Publish the blocks that the engine no longer holds."""
        self._send(_removed(block_hashes))

    def publish_batch(self, events: Iterable[Mapping[str, object]]) -> None:
        """Several changes in order: `{"type": "stored" | "removed", ...}` with the arguments of the methods above.

        The whole list is checked first: ValueError for any of them publishes none of them.
        """
        self._send([data for number, event in enumerate(events) for data in self._checked(number, event)])

    def publish_changes(self, changes: Sequence[BlockChange], tier: str = DEVICE) -> None:
        """Publish changes that have their published shape already, at most 128 blocks each: of an engine that computes
        the hashes of block contents itself. All are of one storage tier.
        """
        self._send(changes, tier)

    def publish_cleared(self) -> None:
        """Publish the loss of all blocks of the engine."""
        self._send(["cleared"])

    def take_engine_events(self, events: Sequence[EngineEvent]) -> None:
        """Publish an engine's own events together. Raises ValueError for a stored event whose parts do not fit together:
        then none of them is published.
        """
        self._send_changes(self._hasher.changes_of(events))

    def answer(self, start_event_id: int | None, end_event_id: int | None) -> dict[str, Any]:
        """Return the answer for a router that missed events; see `KvLedger.answer`. Any thread."""
        with self._lock:
            return self._ledger.answer(start_event_id, end_event_id)

    @property
    def rank(self) -> tuple[int, int]:
        """(worker id, data-parallel rank) of its blocks."""
        return self._rank.worker_id, self._rank.dp_rank

    def shutdown(self) -> None:
        """Publish nothing more; idempotent. With a ZMQ source or a local indexer: on the event loop."""
        if self._recovery is not None:
            self._recovery.stop()
        if self._engine is not None:
            self._engine.close()
        self._repeats.close()
        self._outbox.close()

    def _checked(self, number: int, event: Mapping[str, Any]) -> list[BlockChange]:
        arguments = {key: value for key, value in event.items() if key != "type"}
        arguments["is_eagle"] = bool(arguments.get("is_eagle"))
        try:
            match event.get("type"):
                case "stored":
                    return self._hasher.changes(_StoredBlocks(**arguments))
                case "removed":
                    return _removed(event["block_hashes"])
                case other:
                    raise ValueError(f"type must be stored or removed, got {other!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"events[{number}]: {error}") from error

    def _send(self, changes: Sequence[BlockChange], tier: str = DEVICE) -> None:
        self._send_changes([(tier, change) for change in changes])

    def _send_changes(self, changes: Sequence[TierChange]) -> None:
        with self._lock:
            events = [event for tier, data in changes if (event := self._ledger.add(tier, data)) is not None]
            for start in range(0, len(events), MAX_EVENTS_PER_MESSAGE):
                self._outbox.put(events[start : start + MAX_EVENTS_PER_MESSAGE])

    def _publish_last(self) -> None:
        """Publish the last event again, also where its own message never left."""
        with self._lock:
            event = self._ledger.last_event
        if event is not None:
            self._channel.publish([event])

    def _envelope(self, event_id: int, tier: str, data: BlockChange) -> PublishedEvent:
        return {
            "worker_id": self._rank.worker_id,
            "storage_tier": tier,
            "residency_domain": "worker",
            "event": {"event_id": event_id, "data": data, "dp_rank": self._rank.dp_rank},
        }


def _removed(block_hashes: Sequence[int]) -> list[BlockChange]:
    names = [to_unsigned(name) for name in block_hashes]
    return [
        {"removed": {"block_hashes": names[start : start + MAX_BLOCKS_PER_EVENT]}}
        for start in range(0, len(names), MAX_BLOCKS_PER_EVENT)
    ]
