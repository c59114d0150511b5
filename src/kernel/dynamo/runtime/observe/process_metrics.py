"""What a process is: its age, its CPU time, its memory and its descriptors, read from the kernel at each scrape."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dynamo.runtime.base.forever import FAILURES
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
