"""Engine registries, worker gauges and the published names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynamo import prometheus_names as names
from dynamo.contract.metrics import (
    EngineMetrics,
    ensure_prometheus_multiproc_dir,
    gather_with_labels,
    register_engine_registry,
    register_global_registry,
)
from dynamo.runtime.calls.request_plane.metrics import CallerMetrics, WorkHandlerMetrics
from dynamo.runtime.observe.endpoint_metrics import EndpointMetrics
from dynamo.runtime.observe.loop_watchdog import LoopBlockMetrics
from dynamo.runtime.observe.metrics import MetricsRegistry
from dynamo.worker.lifecycle_metrics import WorkerMetrics
from support.cases import each_case

NAMES: dict[str, Any] = {
    "namespace": "ns",
    "component": "backend",
    "endpoint": "generate",
    "worker_id": "1f",
    "model": "m",
}
LABELS = 'dynamo_namespace="ns",dynamo_component="backend",dynamo_endpoint="generate",worker_id="1f",model="m"'


@dataclass
class Snapshot:
    kv_used_blocks: int = 5
    kv_total_blocks: int = 10
    gpu_cache_usage: float = 0.5
    dp_rank: int = 0
    kv_cache_hit_rate: float | None = None


def lines(registry: MetricsRegistry) -> list[str]:
    return registry.expose().decode().splitlines()


# -- worker gauges


def test_lifecycle_and_rank_gauges_are_there_without_the_engines_help() -> None:
    registry = MetricsRegistry()
    WorkerMetrics(registry, **NAMES, dp_ranks=[0, 1])
    found = lines(registry)
    for name in ("model_load_time_seconds", "drain_time_seconds", "cleanup_time_seconds"):
        assert f'dynamo_component_{name}{{{LABELS},model_name="m"}} 0' in found
    for rank in (0, 1):
        assert f'dynamo_component_total_blocks{{{LABELS},model_name="m",dp_rank="{rank}"}} 0' in found
        assert f'dynamo_component_gpu_cache_usage_percent{{{LABELS},model_name="m",dp_rank="{rank}"}} 0' in found
    assert not any("kv_cache_hit_rate" in line for line in found)


def test_a_hit_rate_appears_with_its_first_measurement_also_zero() -> None:
    registry = MetricsRegistry()
    metrics = WorkerMetrics(registry, **NAMES, dp_ranks=[0])
    metrics.publish(0, Snapshot(kv_cache_hit_rate=None))
    absent = any("kv_cache_hit_rate" in line for line in lines(registry))
    metrics.publish(0, Snapshot(kv_cache_hit_rate=0.0))
    assert not absent
    assert f'dynamo_component_kv_cache_hit_rate{{{LABELS},model_name="m",dp_rank="0"}} 0' in lines(registry)


def test_the_argument_decides_the_rank_and_the_gauges_follow_the_snapshot() -> None:
    registry = MetricsRegistry()
    assert WorkerMetrics(registry, **NAMES, dp_ranks=[3]).publish(3, Snapshot(dp_rank=0))
    assert f'dynamo_component_total_blocks{{{LABELS},model_name="m",dp_rank="3"}} 10' in lines(registry)
    assert f'dynamo_component_gpu_cache_usage_percent{{{LABELS},model_name="m",dp_rank="3"}} 0.5' in lines(registry)


def test_an_undeclared_rank_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry()
    metrics = WorkerMetrics(registry, **NAMES, dp_ranks=[0, 1])
    assert [metrics.publish(7, Snapshot()) for _ in range(3)] == [False, False, False]
    assert not any('dp_rank="7"' in line for line in lines(registry))
    assert len(caplog.records) == 1


def test_the_served_name_wins_and_empty_names_give_no_label() -> None:
    served, bare = MetricsRegistry(), MetricsRegistry()
    WorkerMetrics(served, **NAMES, model_name="served")
    WorkerMetrics(bare, **{**NAMES, "model": ""})
    assert f'dynamo_component_drain_time_seconds{{{LABELS},model_name="served"}} 0' in lines(served)
    assert not any("model" in line.partition("{")[2] for line in lines(bare))


# -- the engine's handle


def test_the_handle_names_this_worker() -> None:
    handle = EngineMetrics(MetricsRegistry(), **NAMES, model_name="served")
    handle.auto_labels["x"] = "y"  # a copy
    assert handle.auto_labels == {
        "dynamo_namespace": "ns",
        "dynamo_component": "backend",
        "dynamo_endpoint": "generate",
        "worker_id": "1f",
        "model": "m",
        "model_name": "served",
    }


def test_a_registry_is_scraped_with_this_workers_labels() -> None:
    ours, theirs = MetricsRegistry(), CollectorRegistry()
    Gauge("vllm:queue", "Waiting", ["model"], registry=theirs).labels("own").set(3)
    Counter("vllm:tokens", "Tokens", registry=theirs).inc()
    register_engine_registry(EngineMetrics(ours, **NAMES), theirs, prefix_filters=["vllm:"])
    found = lines(ours)
    assert "# TYPE vllm:queue gauge" in found
    [queue] = [line for line in found if line.startswith("vllm:queue{")]
    assert 'model="own"' in queue  # the label on the sample beats ours
    assert 'worker_id="1f"' in queue
    assert queue.endswith("} 3.0")


def test_a_typed_callback_is_scraped_too() -> None:
    ours = MetricsRegistry()
    EngineMetrics(ours, **NAMES).register_prometheus_typed_callback(lambda: [("x", "X", "gauge", [("x", [], 1.0)])])
    assert "x 1" in lines(ours)


# -- gather_with_labels


def full_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("a_x", "A", registry=registry).set(1)
    Gauge("b_x", "B", ["k"], registry=registry).labels('v"1,}').set(2)
    Histogram("h", "H", registry=registry, buckets=(1.0,)).observe(0.5)
    return registry


def test_labels_are_added_where_they_are_missing() -> None:
    text = gather_with_labels(full_registry(), {"k": "ours", "n": 'q"'})
    assert 'a_x{k="ours",n="q\\""} 1.0\n' in text
    assert 'b_x{k="v\\"1,}",n="q\\""} 2.0\n' in text
    assert text.endswith("\n")


@pytest.mark.parametrize("reserved", ["le", "quantile"])
def test_bucket_labels_are_never_added(reserved: str) -> None:
    assert "ours" not in gather_with_labels(full_registry(), {reserved: "ours"})


def test_a_filter_takes_help_and_type_with_it() -> None:
    text = gather_with_labels(full_registry(), {}, prefix_filters=["a_", "h"], exclude_prefixes=["h_sum", "h_cre"])
    assert "b_x" not in text
    assert "# TYPE a_x gauge" in text
    assert "h_bucket" in text
    assert "h_sum" not in text


def test_no_labels_change_nothing() -> None:
    registry = full_registry()
    assert gather_with_labels(registry, {}) == prometheus_client.generate_latest(registry).decode()


def test_a_broken_collector_is_an_empty_text_and_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def collect(self) -> Any:
            raise RuntimeError("vendor")

        def describe(self) -> Any:
            return []

    registry = CollectorRegistry()
    registry.register(Broken())
    assert gather_with_labels(registry, {}) == ""
    assert caplog.records[0].levelname == "ERROR"


# -- the global registry; its library decides at import, so each case is a process of its own


@pytest.mark.parametrize("prefixes", [None, ["lmcache:"]])
def test_a_variable_that_names_no_directory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, prefixes: list[str] | None
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    ours = MetricsRegistry()
    register_global_registry(EngineMetrics(ours, **NAMES), engine_prefix="x", multiproc_only_prefixes=prefixes)
    assert ours.has_callbacks
    assert "is not a directory" in caplog.text


# -- the directory


def test_a_directory_is_made_exported_and_owned_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # so that monkeypatch restores it
    created = ensure_prometheus_multiproc_dir("test-")
    assert created is not None
    with created as path:
        assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == path
        assert Path(path).name.startswith("test-")
        assert Path(path).is_dir()


@pytest.mark.parametrize("exists", [True, False])
def test_a_preset_directory_is_the_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, exists: bool
) -> None:
    path = tmp_path if exists else tmp_path / "new"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(path))
    assert ensure_prometheus_multiproc_dir("test-") is None
    assert path.is_dir()
    assert len(caplog.records) == (0 if exists else 1)


# -- names


def constants(group: type) -> set[str]:
    return {value for key, value in vars(group).items() if key.isupper()}


@each_case(
    ("prefix", "published", "make"),
    [
        (
            names.name_prefix.COMPONENT,
            constants(names.work_handler) - constants(names.work_handler_pool) - {"error_type"},
            lambda registry: EndpointMetrics(registry, namespace="n", component="c", endpoint="e", worker_id="1").error(
                "generate"
            ),
        ),
        (
            names.name_prefix.COMPONENT,
            constants(names.lifecycle) | constants(names.kvstats),
            lambda registry: WorkerMetrics(registry, **NAMES, dp_ranks=[0]).publish(0, Snapshot(kv_cache_hit_rate=1.0)),
        ),
        (
            names.name_prefix.WORK_HANDLER,
            constants(names.work_handler_pool),
            lambda registry: (WorkHandlerMetrics(registry), LoopBlockMetrics(registry)),
        ),
        (names.name_prefix.REQUEST_PLANE, constants(names.request_plane), CallerMetrics),
    ],
)
def test_the_published_names_are_those_that_are_exposed(
    prefix: str, published: set[str], make: Callable[[MetricsRegistry], Any]
) -> None:
    registry = MetricsRegistry()
    make(registry)
    exposed = {line.split()[2] for line in lines(registry) if line.startswith("# TYPE")}
    assert {name for name in exposed if name.startswith(prefix)} == {f"{prefix}_{name}" for name in published}


def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    registry = MetricsRegistry()
    with pytest.raises(ImportError, match=r"pip install .*prometheus-client"):
        register_global_registry(registry, engine_prefix="engine:")
