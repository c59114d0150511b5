"""What a frontend shows of its files and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.protocol.batches.status import BatchStatus
from dynamo.runtime.observe.metrics import Family

_LINE_BUCKETS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

FAMILIES: Final = (
    Family("batch_jobs", "gauge", "[Batches](batches.md) by their state", ("status",)),
    Family(
        "batch_lines_total",
        "counter",
        "Lines of batches that were executed; `result` is `completed` or `failed`",
        ("result",),
    ),
    Family("batch_backlog_lines", "gauge", "Lines of running batches without a result: a signal to scale by"),
    Family("batch_oldest_line_age_seconds", "gauge", "Since the oldest batch with such lines was made"),
    Family("batch_line_duration_seconds", "histogram", "What the last attempt of a line took", buckets=_LINE_BUCKETS),
    Family("batch_paused_jobs", "gauge", "Batches whose results the disk does not take"),
    Family("files_bytes", "gauge", "Size of all [files](batches.md#files)"),
)


class BatchMetrics:
    """The gauges are those of the process that runs the batches of a directory; the others show 0."""

    def __init__(self, families: FrontendFamilies) -> None:
        families = families.of(FAMILIES)
        self._jobs = families.gauges("batch_jobs")
        self._lines = families.counters("batch_lines_total")
        self._backlog = families.gauge("batch_backlog_lines")
        self._oldest = families.gauge("batch_oldest_line_age_seconds")
        self._paused = families.gauge("batch_paused_jobs")
        self._file_bytes = families.gauge("files_bytes")
        self._line_seconds = families.by_name["batch_line_duration_seconds"].histogram(families.registry)

    def line_ended(self, *, is_success: bool, seconds: float) -> None:
        """Count one executed line; `seconds` is what its last attempt took."""
        self._lines.labels("completed" if is_success else "failed").inc()
        self._line_seconds.observe(seconds)

    def show(
        self, jobs: Mapping[str, int], *, backlog: int, oldest_seconds: float, paused: int, file_bytes: int
    ) -> None:
        """Show the state of the directory. `oldest_seconds`: since the oldest batch with unfinished lines was made."""
        for status in BatchStatus:
            self._jobs.labels(status.value).set(jobs.get(status.value, 0))
        self._backlog.set(backlog)
        self._oldest.set(oldest_seconds)
        self._paused.set(paused)
        self._file_bytes.set(file_bytes)
