"""What an engine declares about its KV cache: where its events come from, and how full each rank is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ComponentSnapshot", "KvEventSource", "PushSource", "ZmqSource"]


@dataclass
class ComponentSnapshot:
    """The load of one data-parallel rank at one moment."""

    kv_used_blocks: int
    """Blocks held by running requests."""
    kv_total_blocks: int
    """Blocks there are."""
    gpu_cache_usage: float
    """Fraction of the cache in use, 0 to 1."""
    dp_rank: int
    """The data-parallel rank."""
    kv_cache_hit_rate: float | None = None
    """Fraction of prompt tokens served from the prefix cache. None: not measured. 0.0: measured, and nothing was found."""


@dataclass(frozen=True)
class ZmqSource:
    """The engine publishes KV events on its own ZMQ PUB socket; the worker subscribes there."""

    endpoint: str
    """Address of the socket, such as tcp://127.0.0.1:5557."""
    topic: str = ""
    """Topic to subscribe to. Empty: all topics."""
    dp_rank: int = 0
    """The data-parallel rank whose cache it is."""
    image_token_id: int | None = None
    """The token that stands in every place of an image, so that routers recognise prompts with the same images."""


@dataclass(frozen=True)
class PushSource:
    """The engine pushes KV events itself: `on_ready(publisher)` is called once, synchronously."""

    on_ready: Callable[[Any], None]
    """Receives the `KvEventPublisher` (`dynamo._core`). The engine drives it from a thread of its own, which must have
    ended when `cleanup()` returns."""
    dp_rank: int = 0
    """The data-parallel rank whose cache it is."""


KvEventSource = ZmqSource | PushSource
"""Where the KV events of one data-parallel rank come from."""
