"""The loads and unloads of many models, as metrics. The only labels that name a model are the names that the command was given."""

from __future__ import annotations

from functools import partial
from typing import Final

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.residency.machine import Residency, Resident, UnloadReason
from dynamo.runtime.observe.metrics import Family

_MODEL: Final = ("model",)
_LOADED, _FAILED = "loaded", "failed"
_UNLOAD_BUCKETS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

FAMILIES: Final = (
    Family(
        "residency_loads_total", "counter",
        "Loads of one of [many models](many-models.md) that ended; `result` is `loaded` or `failed`", ("model", "result"),
    ),
    Family(
        "residency_unloads_total", "counter",
        "Unloads that were ordered; `reason` is `idle`, `room` (others needed its memory) or `outgrown` (it took more than its estimate while it was loaded)",
        ("model", "reason"),
    ),
    Family("residency_load_seconds", "histogram", "From the order to load a model until requests can go to it", _MODEL),
    Family(
        "residency_unload_seconds", "histogram", "From the order to unload a model until its process has ended", _MODEL,
        _UNLOAD_BUCKETS,
    ),
    Family("residency_wait_seconds", "histogram", "How long a request waited until its model was loaded", _MODEL),
    Family("residency_waiting_requests", "gauge", "Requests that wait for a model to be loaded", _MODEL),
    Family("residency_memory_bytes", "gauge", "What a model takes now; of one that is being loaded under a budget, by now", _MODEL),
    Family("residency_budget_bytes", "gauge", "What all models may take together; absent without a limit"),
)  # fmt: skip


class ResidencyMetrics:
    """The families of many models."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._families = families.of(FAMILIES)
        self._loads = self._families.counters("residency_loads_total")
        self._unloads = self._families.counters("residency_unloads_total")
        self._load_seconds = self._families.histograms("residency_load_seconds")
        self._unload_seconds = self._families.histograms("residency_unload_seconds")
        self._wait_seconds = self._families.histograms("residency_wait_seconds")

    def show(self, residency: Residency) -> None:
        """Show every model from now on, at 0 what has not happened yet."""
        waiting = self._families.gauges("residency_waiting_requests")
        taken = self._families.gauges("residency_memory_bytes")
        for name, model in residency.models.items():
            waiting.labels(name).read_from(partial(_waiting, model))
            taken.labels(name).read_from(partial(_taken, model))
            for histogram in (self._load_seconds, self._unload_seconds, self._wait_seconds):
                histogram.labels(name)
            for result in (_LOADED, _FAILED):
                self._loads.labels(name, result)
            for reason in UnloadReason:
                self._unloads.labels(name, reason.value)
        if residency.budget_bytes is not None:
            self._families.gauge("residency_budget_bytes").set(residency.budget_bytes)

    def loaded(self, name: str, seconds: float) -> None:
        """Count a load that took so long."""
        self._loads.labels(name, _LOADED).inc()
        self._load_seconds.labels(name).observe(seconds)

    def failed(self, name: str) -> None:
        """Count a load that failed."""
        self._loads.labels(name, _FAILED).inc()

    def ordered_out(self, name: str, reason: UnloadReason) -> None:
        """Count an order to unload a model."""
        self._unloads.labels(name, reason.value).inc()

    def gone(self, name: str, seconds: float) -> None:
        """Count an unload that took so long."""
        self._unload_seconds.labels(name).observe(seconds)

    def waited(self, name: str, seconds: float) -> None:
        """Count a request whose wait is over."""
        self._wait_seconds.labels(name).observe(seconds)


def _waiting(model: Resident) -> float:
    return model.waiting


def _taken(model: Resident) -> float:
    return model.memory.taken
