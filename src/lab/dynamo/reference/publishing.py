"""What the router learns of the engine: its KV blocks as they change, and its load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.reference.blocks import BlockEvent, BlocksStored
from dynamo.reference.core import Core
from dynamo.worker.kv_publishing.publisher import ComponentSnapshot, KvEventPublisher, SnapshotPublisher

__all__ = ["EngineReports"]


class EngineReports:
    """Publishes to whoever was attached."""

    def __init__(self) -> None:
        self.events: KvEventPublisher | None = None
        self.snapshots: SnapshotPublisher | None = None
        self._last_snapshot: ComponentSnapshot | None = None

    def attach_events(self, publisher: KvEventPublisher) -> None:
        self.events = publisher

    def publish(self, events: Sequence[BlockEvent], core: Core) -> None:
        """Publish what changed; called by the step thread, after every step and before its results go out."""
        if self.events is not None and events:
            self.events.publish_batch([_published(event, core.pool.block_size) for event in events])
        used, total = core.pool.held, core.pool.blocks
        snapshot = ComponentSnapshot(used, total, used / total, 0, core.hit_rate)
        if self.snapshots is not None and snapshot != self._last_snapshot:
            self._last_snapshot = snapshot
            self.snapshots.publish(0, snapshot)


def _published(event: BlockEvent, block_size: int) -> dict[str, Any]:
    if not isinstance(event, BlocksStored):  # a cleared cache is every block of it removed
        return {"type": "removed", "block_hashes": event.block_hashes}
    return {
        "type": "stored",
        "token_ids": event.token_ids,
        "num_block_tokens": [block_size],
        "block_hashes": [event.block_hash],
        "parent_hash": event.parent_hash,
        "lora_name": event.key.lora_name,
        "cache_salt": event.key.cache_salt,
    }
