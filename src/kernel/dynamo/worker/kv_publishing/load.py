"""How busy a worker is, as routers and frontends read it: the records of the topic `kv_metrics`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from dynamo.contract.kv_events import ComponentSnapshot
from dynamo.errors import InvalidArgument
from dynamo.worker.kv_publishing.outbox import EventChannel

logger = logging.getLogger(__name__)

KV_METRICS_TOPIC: Final = "kv_metrics"
_RANKS: Final = 2**32
_COUNTS: Final = 2**64

LOAD_INTERVAL_SECONDS: Final = 0.1  # loads are reported on change, at most this often
REPEAT_SECONDS: Final = 2.5
"""Unchanged loads are reported again after this time. A subscriber that comes late, `dynamo top --once` for one, has no
other way to the load of an idle worker, and a report that was lost is made good."""


class RankLoad(Struct, frozen=True):
    """The load of one data-parallel rank. None: not known."""

    active_decode_blocks: int | None = None  # KV blocks of the requests that run
    active_prefill_tokens: int | None = None  # prompt tokens of the requests that have no token yet
    kv_used_blocks: int | None = None  # as the engine counts them, with what it keeps for later prompts


class WorkerMetricsPublisher:
    """Reports how busy each data-parallel rank is: on change, at most every 100 ms, and again every 2.5 s."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[int, RankLoad] = {}  # one entry per rank this worker hosts
        self._sent: dict[int, RankLoad] = {}
        self._is_scheduled = False
        self._is_closed = False
        self._worker_id = 0
        self._channel: EventChannel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def create_endpoint(self, endpoint: Any, *, channel: EventChannel | None = None) -> None:
        """Connect to the event plane; what was published before is sent now."""
        self._worker_id = endpoint.connection_id()
        self._channel = endpoint.event_channel(KV_METRICS_TOPIC) if channel is None else channel
        self._loop = asyncio.get_running_loop()
        self._flush()

    def publish(
        self, dp_rank: int | None = None, active_decode_blocks: int | None = None, kv_used_blocks: int | None = None
    ) -> None:
        """Set the load of one rank (None: rank 0); figures left None are unknown. Any thread.

        Raises InvalidArgument without any figure, TypeError and OverflowError for what is not an unsigned integer.
        """
        if active_decode_blocks is None and kv_used_blocks is None:
            raise InvalidArgument("worker metrics publish requires at least one load metric")
        for name, value, limit in (
            ("dp_rank", dp_rank, _RANKS),
            ("active_decode_blocks", active_decode_blocks, _COUNTS),
            ("kv_used_blocks", kv_used_blocks, _COUNTS),
        ):
            if value is None:
                continue
            if not hasattr(value, "__index__"):  # NumPy's integers have it, too
                raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
            if not 0 <= value < limit:
                raise OverflowError(f"{name} must be an unsigned integer below {limit}, got {value}")
        self.update(
            index(dp_rank or 0),
            active_decode_blocks=None if active_decode_blocks is None else index(active_decode_blocks),
            kv_used_blocks=None if kv_used_blocks is None else index(kv_used_blocks),
        )

    def update(self, dp_rank: int, **figures: int | None) -> None:
        """Change the figures (members of `RankLoad`) that are given, and keep the others. Any thread."""
        with self._lock:
            before = self._loads.get(dp_rank)
            load = replace(before or RankLoad(), **figures)
            if before == load or self._is_closed:
                return
            self._loads[dp_rank] = load
            if self._is_scheduled or self._loop is None:
                return
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed: the process is on its way out
                self._is_closed = True

    def close(self) -> None:
        """Send nothing more; call it on the event loop."""
        with self._lock:
            self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _flush(self, *, is_repeat: bool = False) -> None:
        with self._lock:
            if self._is_closed or self._loop is None or self._channel is None:
                return
            changed = {rank: load for rank, load in self._loads.items() if self._sent.get(rank) != load}
            self._sent.update(changed)
            reported = dict(self._loads) if is_repeat else changed
            if self._timer is not None:
                self._timer.cancel()
            # While figures keep coming the timer collects them; after an interval without change it repeats the last ones.
            self._is_scheduled = bool(changed)
            if changed:
                self._timer = self._loop.call_later(LOAD_INTERVAL_SECONDS, self._flush)
            elif self._loads:
                self._timer = self._loop.call_later(REPEAT_SECONDS, partial(self._flush, is_repeat=True))
        for rank, load in reported.items():
            try:
                self._channel.publish(
                    {
                        "worker_id": self._worker_id,
                        "dp_rank": rank,
                        "active_decode_blocks": load.active_decode_blocks,
                        "active_prefill_tokens": load.active_prefill_tokens,
                        "kv_used_blocks": load.kv_used_blocks,
                    }
                )
            except Exception:  # the next report may get through
                logger.exception("a load report could not be published")


class SnapshotPublisher:
    """Turns an engine's snapshots into gauges and into the router's load signal. The worker keeps it until `cleanup`."""

    def __init__(
        self,
        write_gauges: Callable[[int, ComponentSnapshot], bool],
        publish_load: Callable[[int, int], None] | None = None,
    ) -> None:
        """`write_gauges(dp_rank, snapshot)` returns whether the rank was declared; `publish_load(dp_rank, used_blocks)`."""
        self._write_gauges = write_gauges
        self._publish_load = publish_load
        self._failed_ranks: set[int] = set()

    def publish(self, dp_rank: int, snapshot: ComponentSnapshot) -> None:
        """Report one rank: that of the argument, whatever rank the snapshot names. An undeclared rank is dropped."""
        if not self._write_gauges(dp_rank, snapshot) or self._publish_load is None:
            return
        try:
            self._publish_load(dp_rank, snapshot.kv_used_blocks)
        except Exception as error:  # the gauges are written; the router's view recovers with the next snapshot
            level = logging.DEBUG if dp_rank in self._failed_ranks else logging.WARNING
            self._failed_ranks.add(dp_rank)
            logger.log(level, "the load of rank %d did not reach the router: %s", dp_rank, error)
