"""Metrics of workers without an engine class: their own gauges, and registries of `prometheus_client`.

As `dynamo.contract.metrics`, this module must not import `prometheus_client` when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo.common.absent import load_name
from dynamo.contract.metrics import gather_with_labels

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["LLMBackendMetrics", "gather_with_labels", "get_prometheus_expfmt", "register_engine_metrics_callback"]

__getattr__ = partial(load_name, __name__)


class LLMBackendMetrics:
    """The gauges of one worker's KV cache and model, in a registry of its own or a given one."""

    def __init__(
        self, registry: CollectorRegistry | None = None, model_name: str = "", component_name: str = ""
    ) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self.registry = CollectorRegistry() if registry is None else registry
        self._labels = {"model": model_name, "dynamo_component": component_name}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            names = ["model", "dynamo_component", *labels]
            return Gauge(f"dynamo_component_{name}", text, names, registry=self.registry)

        self._total_blocks = gauge("total_blocks", "KV blocks there are", "dp_rank")
        self._cache_usage = gauge("gpu_cache_usage_percent", "Fraction of the KV cache in use, 0 to 1", "dp_rank")
        self._hit_rate = gauge("kv_cache_hit_rate", "Fraction of prompt tokens found in the prefix cache", "dp_rank")
        self._load_time = gauge("model_load_time_seconds", "Seconds that loading the model took")

    def set_total_blocks(self, dp_rank: str, value: int) -> None:
        """Set how many KV blocks a rank has."""
        self._total_blocks.labels(**self._labels, dp_rank=dp_rank).set(value)

    def set_gpu_cache_usage(self, dp_rank: str, value: float) -> None:
        """Set how full the KV cache of a rank is, 0 to 1."""
        self._cache_usage.labels(**self._labels, dp_rank=dp_rank).set(value)

    def set_kv_cache_hit_rate(self, dp_rank: str, value: float) -> None:
        """Set the fraction of prompt tokens that a rank found in its prefix cache."""
        self._hit_rate.labels(**self._labels, dp_rank=dp_rank).set(value)

    def set_model_load_time(self, value: float) -> None:
        """Set how long loading the model took, in seconds."""
        self._load_time.labels(**self._labels).set(value)


def get_prometheus_expfmt(
    registry: CollectorRegistry,
    metric_prefix_filters: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
    inject_custom_labels: Mapping[str, str] | None = None,
) -> str:
    """Return a registry's exposition text with labels added and metrics filtered by the beginning of their names."""
    return gather_with_labels(
        registry,
        inject_custom_labels or {},
        prefix_filters=metric_prefix_filters,
        exclude_prefixes=exclude_prefixes,
    )


def register_engine_metrics_callback(
    endpoint: Any,
    registry: CollectorRegistry,
    metric_prefix_filters: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
    inject_custom_labels: Mapping[str, str] | None = None,
    namespace_name: str | None = None,
    component_name: str | None = None,
    endpoint_name: str | None = None,
    model_name: str | None = None,
) -> None:
    """Append a registry to every scrape of the worker that serves `endpoint`, with the names given as labels."""
    labels = {
        "dynamo_namespace": namespace_name,
        "dynamo_component": component_name,
        "dynamo_endpoint": endpoint_name,
        "model": model_name,
        "model_name": model_name,
    }
    added = {name: value for name, value in labels.items() if value} | dict(inject_custom_labels or {})
    endpoint.metrics.register_prometheus_expfmt_callback(
        lambda: get_prometheus_expfmt(registry, metric_prefix_filters, exclude_prefixes, added)
    )
