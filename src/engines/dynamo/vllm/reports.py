"""What vLLM reports to routers: its load, by a stat logger, and where its KV events come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.contract.kv_events import ComponentSnapshot, KvEventSource, ZmqSource

if TYPE_CHECKING:
    from dynamo.worker.kv_publishing.publisher import SnapshotPublisher

IPC: Final = "ipc://"


class LoadReports:
    """Takes vLLM's statistics, once for each of its steps, and publishes snapshots to the publisher that is attached."""

    def __init__(self) -> None:
        self.publisher: SnapshotPublisher | None = None
        self.blocks_per_rank = 0
        self._used: dict[int, int] = {}  # by rank: blocks
        self._hits: dict[int, tuple[int, int]] = {}  # by rank: tokens looked up in the prefix cache, and found there

    @property
    def used_blocks(self) -> int:
        """The KV blocks of all ranks that requests used at the end of vLLM's last step."""
        return sum(self._used.values())

    def factory(self) -> Callable[..., Any]:
        """Return what vLLM's `stat_loggers` takes."""
        return lambda vllm_config, engine_index=0: _StatLogger(self)

    def record(self, rank: int, stats: Any) -> None:
        """Publish the load of one rank. A member that a release does not have is not reported."""
        cache = getattr(stats, "prefix_cache_stats", None)
        asked, found = self._hits.get(rank, (0, 0))
        if cache is not None:  # of this step alone
            asked, found = asked + cache.queries, found + cache.hits
            self._hits[rank] = asked, found
        usage = float(stats.kv_cache_usage)
        self._used[rank] = used = round(usage * self.blocks_per_rank)
        if self.publisher is None:
            return
        rate = found / asked if asked else None
        self.publisher.publish(rank, ComponentSnapshot(used, self.blocks_per_rank, usage, rank, rate))


class _StatLogger:
    """The shape that vLLM expects of a stat logger; later releases may pass more."""

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_later: Any,
    ) -> None:
        if scheduler_stats is not None:
            self._reports.record(engine_idx, scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Log nothing: vLLM's own loggers do."""

    def log(self) -> None:
        """Log nothing."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0, **_later: Any) -> None:
        """Record nothing: the caller that puts the engine to sleep reports it."""


def events_address(directory: Path) -> str:
    """Return where vLLM has to publish KV events: a socket in a private directory, so that ports cannot collide.

    Higher ranks add a suffix. vLLM does that for addresses with `inproc` in them, and adds the rank to a TCP port.
    """
    return f"{IPC}{directory}/inproc-kv-events"


def rank_address(address: str, rank: int) -> str:
    """Return the address of one rank, as vLLM derives it from the first one's."""
    if rank == 0:
        return address
    if "inproc" in address:
        return f"{address}_dp{rank}"
    base, _, port = address.rpartition(":")
    return f"{base}:{int(port) + rank}"


def event_sources(config: Any, ranks: range) -> list[KvEventSource]:
    """Return the sources of KV events; none where vLLM publishes none. `config` is its `KVEventsConfig`."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return []
    return [ZmqSource(rank_address(config.endpoint, rank), topic=config.topic, dp_rank=rank) for rank in ranks]
