"""What an engine declares about its KV cache: where its events come from, and how full each rank is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo.worker.kv_publishing.publisher import KvEventPublisher

__all__ = ["ComponentSnapshot", "KvEventSource", "PushSource", "ZmqSource"]


@dataclass
class ComponentSnapshot:
    """The load of one data-parallel rank at one moment."""

    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float  # fraction, 0 to 1
    dp_rank: int
    kv_cache_hit_rate: float | None = None  # None: not measured; 0.0: measured, and nothing was found


@dataclass(frozen=True)
class ZmqSource:
    """The engine publishes KV events on its own ZMQ PUB socket; the worker subscribes there."""

    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass(frozen=True)
class PushSource:
    """The engine pushes KV events itself: `on_ready(publisher)` is called once, synchronously.

    The engine then drives the publisher from a thread of its own, which must have ended when `cleanup()` returns.
    """

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


KvEventSource = ZmqSource | PushSource
