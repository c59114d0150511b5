"""What a process reports about itself: metrics, health, progress, a blocked event loop, and the server that shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dynamo.runtime.base.addresses import bind_host
from dynamo.runtime.base.forever import FAILURES
from dynamo.runtime.base.settings import RequestPlaneSettings, RuntimeSettings, WatchdogSettings
from dynamo.runtime.calls.health import HealthState
from dynamo.runtime.calls.progress import ServingProgress
from dynamo.runtime.calls.request_plane.core import ServerCore
from dynamo.runtime.calls.request_plane.metrics import WorkHandlerMetrics
from dynamo.runtime.http.status_server import StatusServer
from dynamo.runtime.observe.loop_watchdog import LoopWatchdog
from dynamo.runtime.observe.metrics import Family, MetricsRegistry
from dynamo.runtime.observe.metrics.registry import Collected

UPTIME: Final = Family("dynamo_component_uptime_seconds", "gauge", "Seconds since the runtime started", ("worker_id",))
PROCESS: Final = {
    "cpu": Family("process_cpu_seconds_total", "counter", "User and system CPU time"),
    "resident": Family("process_resident_memory_bytes", "gauge", "Resident memory"),
    "virtual": Family("process_virtual_memory_bytes", "gauge", "Virtual memory"),
    "open_fds": Family("process_open_fds", "gauge", "Open file descriptors"),
    "max_fds": Family("process_max_fds", "gauge", "Limit of open file descriptors"),
    "start": Family("process_start_time_seconds", "gauge", "When the process started, in seconds of Unix time"),
}
"""The names that the Prometheus client libraries use; a worker whose engine exposes its own keeps the engine's."""

LOOP_FAILURES: Final = Family(
    "dynamo_loop_failures_total", "counter", "How often work that runs for ever has failed and begun again"
)

_PROC: Final = Path("/proc")


def register_uptime(registry: MetricsRegistry, worker_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Expose the uptime, counted from this call."""
    began = clock()
    UPTIME.gauge(registry, {"worker_id": worker_id}).read_from(lambda: clock() - began)


def register_process(registry: MetricsRegistry) -> None:
    """Expose the values of this process. Where there is no `/proc`, only its CPU time is known."""
    registry.add_collector(_collect)


def _collect() -> Iterator[Collected]:
    yield LOOP_FAILURES.name, LOOP_FAILURES.kind, LOOP_FAILURES.help, float(FAILURES.count)
    for key, value in process_values().items():
        family = PROCESS[key]
        yield family.name, family.kind, family.help, value


def process_values(proc: Path = _PROC) -> dict[str, float]:
    """Return what is known now, by the keys of `PROCESS`. It costs about 50 us."""
    values = {"cpu": time.process_time()}
    try:
        fields = (proc / "self" / "stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in (proc / "stat").read_text().splitlines() if line.startswith("btime "))
        ticks = os.sysconf("SC_CLK_TCK")
        # The fields are counted from the state, which is the third of the file: starttime is the 22nd, vsize the 23rd.
        values["start"] = float(boot.split()[1]) + int(fields[19]) / ticks
        values["virtual"] = float(fields[20])
        values["resident"] = float(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
        values["open_fds"] = float(len(os.listdir(proc / "self" / "fd")))
        limits = (proc / "self" / "limits").read_text().splitlines()
        open_files = next(line for line in limits if line.startswith("Max open files"))
        values["max_fds"] = float(open_files.split()[3].replace("unlimited", "inf"))
    except (OSError, ValueError, IndexError, StopIteration):
        return values  # another system, or a container without /proc: the rest is not known
    return values


class Observability:
    """The reports of one runtime. Everything may be read from any thread: a scrape runs in one."""

    def __init__(self, store: str, settings: RuntimeSettings, *, watches_loop: bool) -> None:
        """`store`: of discovery, by which the status server chooses its address. `watches_loop` False: no watchdog, as under
        a simulated clock time does not pass as it does for a thread."""
        self._system = settings.system
        self.metrics = MetricsRegistry()
        self.canary_settings = settings.canary
        self.health = HealthState(
            starting_ready=self._system.starting_ready, canary_enabled=self.canary_settings.enabled
        )
        self.progress = ServingProgress(settings.progress.limit_seconds)
        host = bind_host(store, None, "0.0.0.0")
        self.status_server = StatusServer(self.health, self.metrics, settings=self._system, default_host=host)
        self.core: ServerCore | None = None  # of the requests that are served, once there is a listener
        self._watchdog = self._make_watchdog(settings.watchdog) if watches_loop else None
        self.health.add_trouble(self.progress.trouble)
        self.health.add_detail("load", self._load)
        self.health.add_detail("failing", _failing)

    async def start(self, connection_id: int) -> None:
        """Register what every process counts, and listen where a status server is configured. Raises CannotConnect."""
        register_uptime(self.metrics, f"{connection_id:x}")
        register_process(self.metrics)
        if self._system.enabled:
            await self.status_server.start()

    async def close(self) -> None:
        """Stop watching and serving. Idempotent."""
        self.progress.close()
        if self._watchdog is not None:
            self._watchdog.close()
        await self.status_server.close()

    def watch_requests(self, core: ServerCore, settings: RequestPlaneSettings) -> None:
        """Report on the requests that a listener takes, from now on."""
        self.core = core
        if self._watchdog is not None:
            self._watchdog.start()
        _expose(core, self.metrics, settings, self.progress)

    @property
    def queued_requests(self) -> int:
        """Requests that were admitted and wait for a place."""
        return self.core.queued if self.core is not None else 0

    def _make_watchdog(self, settings: WatchdogSettings) -> LoopWatchdog:
        watchdog = LoopWatchdog(
            self.metrics,
            settings.threshold_seconds,
            answer_probes=self.status_server.answer_while_blocked,
        )
        self.health.add_trouble(watchdog.trouble)
        self.health.add_detail("last_block", watchdog.describe_last_block)
        return watchdog

    def _load(self) -> dict[str, float]:
        """Return what `/health` shows of the work under way; empty where there is none."""
        progress, core = self.progress, self.core
        queued = 0 if core is None else core.queued
        if not progress.running and not queued:
            return {}
        return {
            "running": progress.running,
            "queued": queued,
            "queue_age_seconds": round(core.queue_age_seconds, 3) if core is not None else 0.0,
            "silent_seconds": progress.silent_seconds,
            "longest_silence_seconds": progress.longest_silence_seconds,
            "loop_lag_seconds": round(progress.loop_lag_seconds, 3),
        }


def _failing() -> dict[str, list[str]]:
    """Return what `/health` shows of work that runs for ever and has failed lately; empty where none has."""
    troubles = FAILURES.troubles()
    return {"loops": troubles} if troubles else {}


def _expose(
    core: ServerCore, registry: MetricsRegistry, settings: RequestPlaneSettings, progress: ServingProgress
) -> None:
    """Let the gauges of admission read the core at every scrape, and let the core report what only the core knows."""
    metrics = WorkHandlerMetrics(registry)
    limited = settings.engine_request_limit is not None
    run = settings.engine_request_limit if limited else settings.worker_pool_size
    queue = settings.engine_queue_limit if limited else settings.work_queue_size
    metrics.engine_requests.read_from(lambda: core.running)
    metrics.queued_requests.read_from(lambda: core.queued)
    metrics.pool_active_tasks.read_from(lambda: core.running)
    metrics.queue_depth.read_from(lambda: core.queued)
    metrics.queue_age.read_from(lambda: core.queue_age_seconds)
    metrics.silence.read_from(lambda: progress.silent_seconds)
    metrics.longest_silence.read_from(lambda: progress.longest_silence_seconds)
    metrics.loop_lag.read_from(lambda: progress.loop_lag_seconds)
    metrics.pool_capacity.set(run or 0)
    metrics.queue_capacity.set(queue)

    def rejected() -> None:
        metrics.rejected_requests.inc()
        metrics.enqueue_rejected.inc()

    core.observe(
        waited=metrics.permit_wait_seconds.observe,
        rejected=rejected,
        answered=metrics.time_to_first_response_seconds.observe,
    )
