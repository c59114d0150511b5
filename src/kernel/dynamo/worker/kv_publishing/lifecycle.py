"""The worker's end of what an engine publishes: builds the publishers it declared, and keeps them until the clean-up."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.contract.engine_config import EngineConfig
from dynamo.contract.kv_events import PushSource, ZmqSource
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import CannotConnect, DynamoException
from dynamo.runtime.endpoint import Endpoint
from dynamo.worker.kv_publishing.load import KV_METRICS_TOPIC, SnapshotPublisher, WorkerMetricsPublisher
from dynamo.worker.kv_publishing.outbox import EventChannel
from dynamo.worker.kv_publishing.publisher import KV_EVENTS_TOPIC, KvEventPublisher
from dynamo.worker.kv_publishing.recovery import KvRecovery
from dynamo.worker.lifecycle_metrics import WorkerMetrics
from dynamo.worker.running_requests import RunningRequests

logger = logging.getLogger(__name__)


class Publishing:
    """The publishers of one engine."""

    def __init__(self, endpoint: Endpoint, config: EngineConfig, *, enable_local_indexer: bool) -> None:
        self._endpoint = endpoint
        self._block_size = config.kv_cache_block_size
        self._enable_local_indexer = enable_local_indexer
        self._ranks = _hosted_ranks(config)
        self._total_blocks = config.total_kv_blocks
        self._loads: WorkerMetricsPublisher | None = None
        self._recoverable: list[tuple[KvEventPublisher, int]] = []
        self._close: list[Callable[[], Awaitable[None] | None]] = []

    def connect_kv_events(self, sources: object) -> None:
        """Build one publisher for each source that `kv_event_sources()` declared.

        Raises TypeError for anything else than a list of sources, CannotConnect when a publisher cannot be built, and
        what `on_ready` raises.
        """
        checked = _checked_sources(sources)
        if not checked:
            return
        if self._block_size is None:
            logger.warning(
                "kv_event_sources() declared %d source(s), but EngineConfig.kv_cache_block_size is not set: "
                "no KV events are published and KV-aware routing falls back to round-robin",
                len(checked),
            )
            return
        for source in checked:
            channel = self._endpoint.event_channel(KV_EVENTS_TOPIC)
            self._close.append(channel.close)
            publisher = self._kv_publisher(self._block_size, source, channel)
            self._close.append(publisher.shutdown)
            self._recoverable.append((publisher, channel.publisher_id))
            if type(source).__name__ == PushSource.__name__:
                source.on_ready(publisher)

    async def serve_recovery(self) -> None:
        """Let routers query missed KV events; once the worker serves, because each publisher gets an endpoint."""
        if not self._enable_local_indexer:
            return
        for publisher, publisher_id in self._recoverable:
            recovery = await KvRecovery.begin(self._endpoint, publisher, publisher_id)
            self._close.append(recovery.close)

    def _kv_publisher(self, block_size: int, source: Any, channel: EventChannel) -> KvEventPublisher:
        try:
            return KvEventPublisher(
                self._endpoint,
                kv_block_size=block_size,
                dp_rank=source.dp_rank,
                enable_local_indexer=self._enable_local_indexer,
                zmq_endpoint=getattr(source, "endpoint", None),
                zmq_topic=getattr(source, "topic", None),
                image_token_id=getattr(source, "image_token_id", None),
                channel=channel,
            )
        except DynamoException:
            raise
        except Exception as error:
            raise CannotConnect(
                f"KV event publisher of rank {source.dp_rank}: {type(error).__name__}: {error}"
            ) from error

    async def snapshot_publisher(self, metrics: WorkerMetrics) -> SnapshotPublisher:
        """Make the publisher for an engine's snapshots. Raises CannotConnect."""
        loads = await self._load_publisher()
        return SnapshotPublisher(
            metrics.publish, lambda rank, used_blocks: loads.update(rank, kv_used_blocks=used_blocks)
        )

    async def running_requests(self, mode: DisaggregationMode) -> RunningRequests | None:
        """Make the book of running requests, which reports the rest of the load; None for an engine without a load to
        report.

        Raises CannotConnect.
        """
        if mode is DisaggregationMode.ENCODE or self._block_size is None:
            return None
        loads = await self._load_publisher()

        def report(rank: int, blocks: int | None, prefill_tokens: int) -> None:
            loads.update(rank, active_decode_blocks=blocks, active_prefill_tokens=prefill_tokens)

        running = RunningRequests(
            report,
            block_size=self._block_size,
            ranks=self._ranks,
            total_blocks=self._total_blocks,
            prefills=mode is not DisaggregationMode.DECODE,
        )
        self._close.append(running.close)
        return running

    async def _load_publisher(self) -> WorkerMetricsPublisher:
        if self._loads is None:
            loads = WorkerMetricsPublisher()
            try:
                channel = self._endpoint.event_channel(KV_METRICS_TOPIC)
                self._close.append(channel.close)
                await loads.create_endpoint(self._endpoint, channel=channel)
            except DynamoException:
                raise
            except Exception as error:
                raise CannotConnect(f"load publisher: {type(error).__name__}: {error}") from error
            self._close.append(loads.close)
            self._loads = loads
        return self._loads

    async def close(self) -> None:
        """End every publisher, the newest first; after `cleanup()`. Idempotent."""
        while self._close:
            ended = self._close.pop()()
            if ended is not None:
                await ended


def _hosted_ranks(config: EngineConfig) -> range:
    first = config.data_parallel_start_rank or 0
    return range(first, first + (config.data_parallel_size or 1))


def _checked_sources(sources: object) -> list[Any]:
    if not isinstance(sources, list):
        raise TypeError(f"kv_event_sources() must return a list, got {type(sources).__name__}")
    for source in sources:
        # By name, so that the descriptors of another copy of the contract are accepted as well.
        if type(source).__name__ not in (ZmqSource.__name__, PushSource.__name__):
            raise TypeError(f"kv_event_sources() must list ZmqSource or PushSource, got {type(source).__name__}")
    return sources
