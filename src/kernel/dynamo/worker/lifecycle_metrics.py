"""The gauges a worker keeps about its engine, without the engine's help."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from dynamo.runtime.observe.endpoint_metrics import AUTO_LABELS, endpoint_labels
from dynamo.runtime.observe.metrics import Family, Gauge, MetricsRegistry

logger = logging.getLogger(__name__)

ENGINE_LABELS: Final = (*AUTO_LABELS, "model", "model_name")
RANK_LABELS: Final = (*ENGINE_LABELS, "dp_rank")

LOAD_TIME: Final = Family(
    "dynamo_component_model_load_time_seconds", "gauge", "Seconds the engine's `start()` took", ENGINE_LABELS
)
DRAIN_TIME: Final = Family(
    "dynamo_component_drain_time_seconds", "gauge", "Seconds the drain phase took; 0 before its end", ENGINE_LABELS
)
CLEANUP_TIME: Final = Family(
    "dynamo_component_cleanup_time_seconds", "gauge", "Seconds `cleanup()` took; 0 before its end", ENGINE_LABELS
)
TOTAL_BLOCKS: Final = Family("dynamo_component_total_blocks", "gauge", "KV blocks the engine has", RANK_LABELS)
CACHE_USAGE: Final = Family(
    "dynamo_component_gpu_cache_usage_percent",
    "gauge",
    "Used part of the KV cache, 0 to 1 (despite its name)",
    RANK_LABELS,
)
HIT_RATE: Final = Family(
    "dynamo_component_kv_cache_hit_rate",
    "gauge",
    "Part of the prompt blocks that the KV cache held, 0 to 1; there from the first measurement on",
    RANK_LABELS,
)
FAMILIES: Final = (LOAD_TIME, DRAIN_TIME, CLEANUP_TIME, TOTAL_BLOCKS, CACHE_USAGE, HIT_RATE)


def worker_labels(
    *, namespace: str, component: str, endpoint: str, worker_id: str, model: str, model_name: str
) -> tuple[tuple[str, str], ...]:
    """Return the labels of a worker's gauges; `model_name` is the served name, else the model. Empty values give no label."""
    return (
        *endpoint_labels(namespace, component, endpoint, worker_id),
        ("model", model),
        ("model_name", model_name or model),
    )


class WorkerMetrics:
    """Times of the lifecycle, and per data-parallel rank how full the KV cache is.

    Created right after `start()` returned. `publish` may be called from any thread; the rest belongs to the loop.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        *,
        namespace: str,
        component: str,
        endpoint: str,
        worker_id: str,
        model: str,
        model_name: str = "",
        dp_ranks: Iterable[int] = (),
    ) -> None:
        """`worker_id` is lower-case hex. The rank gauges exist, at 0, for every declared rank and for no other."""
        labels = worker_labels(
            namespace=namespace,
            component=component,
            endpoint=endpoint,
            worker_id=worker_id,
            model=model,
            model_name=model_name,
        )

        def rank_gauge(family: Family, rank: int) -> Gauge:
            return family.gauge(registry, (*labels, ("dp_rank", str(rank))))

        self._rank_gauge = rank_gauge
        self.model_load_time_seconds = LOAD_TIME.gauge(registry, labels)
        self.drain_time_seconds = DRAIN_TIME.gauge(registry, labels)
        self.cleanup_time_seconds = CLEANUP_TIME.gauge(registry, labels)
        self._ranks = {rank: (rank_gauge(TOTAL_BLOCKS, rank), rank_gauge(CACHE_USAGE, rank)) for rank in dp_ranks}
        self._hit_rates: dict[int, Gauge] = {}
        self._complained = False

    def publish(self, dp_rank: int, snapshot: Any) -> bool:
        """Write one rank's gauges from a `ComponentSnapshot`; return whether the rank was declared (else: one WARNING).

        The hit rate appears with the first value that is not None: None means "not measured", 0.0 is a measurement.
        """
        gauges = self._ranks.get(dp_rank)
        if gauges is None:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "a snapshot for rank %s was dropped: component_metrics_dp_ranks() declared %s",
                    dp_rank,
                    sorted(self._ranks),
                )
            return False
        total_blocks, cache_usage = gauges
        total_blocks.set(int(snapshot.kv_total_blocks))
        cache_usage.set(float(snapshot.gpu_cache_usage))
        hit_rate = snapshot.kv_cache_hit_rate
        if hit_rate is not None:
            held = self._hit_rates.get(dp_rank)
            if held is None:
                held = self._hit_rates[dp_rank] = self._rank_gauge(HIT_RATE, dp_rank)
            held.set(float(hit_rate))
        return True
