"""The metrics registry and the names every dashboard relies on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynamo.runtime.calls.request_plane.metrics import CallerMetrics, WorkHandlerMetrics
from dynamo.runtime.observability import process_values, register_process, register_uptime
from dynamo.runtime.observe.endpoint_metrics import EndpointMetrics
from dynamo.runtime.observe.metrics import DURATION_BUCKETS, Family, MetricsRegistry, sanitize
from dynamo.runtime.observe.metrics.family import Kind
from support.cases import each_case

LABELS = 'dynamo_namespace="ns",dynamo_component="c",dynamo_endpoint="e",worker_id="1f"'


def endpoint_metrics(registry: MetricsRegistry, labels: list[tuple[str, str]] | None = None) -> EndpointMetrics:
    return EndpointMetrics(
        registry, namespace="ns", component="c", endpoint="e", worker_id="1f", user_labels=labels or []
    )


def lines(registry: MetricsRegistry) -> list[str]:
    return registry.expose().decode().splitlines()


def test_an_endpoints_series_exist_at_zero_from_the_start_and_error_types_do_not() -> None:
    registry = MetricsRegistry()
    endpoint_metrics(registry)
    found = lines(registry)
    for name in (
        "requests_total",
        "request_bytes_total",
        "response_bytes_total",
        "inflight_requests",
        "cancellation_total",
        "request_duration_seconds_count",
    ):
        assert f"dynamo_component_{name}{{{LABELS}}} 0" in found
    assert not any("errors_total" in line for line in found)


def test_a_request_is_counted_once_in_each_place() -> None:
    registry = MetricsRegistry()
    metrics = endpoint_metrics(registry)
    metrics.started(120)
    during = lines(registry)
    metrics.response_bytes(77)
    metrics.error("generate")
    metrics.cancelled()
    metrics.finished(0.3)
    after = lines(registry)
    assert f"dynamo_component_inflight_requests{{{LABELS}}} 1" in during
    for line in (
        f"dynamo_component_requests_total{{{LABELS}}} 1",
        f"dynamo_component_request_bytes_total{{{LABELS}}} 120",
        f"dynamo_component_response_bytes_total{{{LABELS}}} 77",
        f"dynamo_component_inflight_requests{{{LABELS}}} 0",
        f"dynamo_component_cancellation_total{{{LABELS}}} 1",
        f'dynamo_component_errors_total{{{LABELS},error_type="generate"}} 1',
        f'dynamo_component_request_duration_seconds_bucket{{{LABELS},le="0.25"}} 0',
        f'dynamo_component_request_duration_seconds_bucket{{{LABELS},le="0.5"}} 1',
        f'dynamo_component_request_duration_seconds_bucket{{{LABELS},le="+Inf"}} 1',
        f"dynamo_component_request_duration_seconds_sum{{{LABELS}}} 0.3",
    ):
        assert line in after


def test_the_duration_buckets_are_the_native_ones() -> None:
    assert DURATION_BUCKETS == (
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600,
    )  # fmt: skip


def test_user_labels_are_appended_and_sanitised() -> None:
    registry = MetricsRegistry()
    endpoint_metrics(registry, [("model", 'a"b'), ("my-label", "x")])
    assert f'dynamo_component_requests_total{{{LABELS},model="a\\"b",my_label="x"}} 0' in lines(registry)


@each_case("name", ["dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id", "worker-id"])
def test_a_user_label_may_not_take_an_automatic_name(name: str) -> None:
    with pytest.raises(ValueError, match="metrics_labels"):
        endpoint_metrics(MetricsRegistry(), [(name, "x")])


def test_a_user_label_may_not_be_given_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        endpoint_metrics(MetricsRegistry(), [("a-b", "x"), ("a_b", "y")])


def test_empty_label_values_give_no_label() -> None:
    registry = MetricsRegistry()
    registry.gauge("g", "", {"a": "", "b": "x"})
    assert 'g{b="x"} 0' in lines(registry)


def test_serving_an_endpoint_again_continues_its_series() -> None:
    registry = MetricsRegistry()
    endpoint_metrics(registry).started(1)
    endpoint_metrics(registry).started(1)
    assert f"dynamo_component_requests_total{{{LABELS}}} 2" in lines(registry)


def test_duplicates_and_changes_of_type_are_refused() -> None:
    registry = MetricsRegistry()
    registry.counter("a_total", "", {"x": "1"})
    registry.counter("a_total", "", {"x": "2"})
    with pytest.raises(ValueError, match="registered already"):
        registry.counter("a_total", "", {"x": "1"})
    with pytest.raises(ValueError, match="is a counter"):
        registry.gauge("a_total", "", {"x": "3"})


def test_a_counter_cannot_fall() -> None:
    with pytest.raises(ValueError, match="cannot fall"):
        MetricsRegistry().counter("a_total", "").inc(-1)


@each_case("buckets", [(), (1.0, 1.0), (2.0, 1.0), (math.inf,)])
def test_nonsense_buckets_are_refused(buckets: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="buckets"):
        MetricsRegistry().histogram("h", "", buckets=buckets)


def test_the_transports_names() -> None:
    registry = MetricsRegistry()
    for make in (WorkHandlerMetrics, CallerMetrics):
        make(registry)
        make(registry)  # one per process, whoever comes first
    names = {line.split()[2] for line in lines(registry) if line.startswith("# TYPE")}
    assert names == {
        "dynamo_engine_request",
        "dynamo_request_queue",
        "dynamo_rejection_request_total",
        "dynamo_work_handler_queue_depth",
        "dynamo_work_handler_queue_age_seconds",
        "dynamo_work_handler_silence_seconds",
        "dynamo_work_handler_longest_silence_seconds",
        "dynamo_work_handler_event_loop_lag_seconds",
        "dynamo_work_handler_queue_capacity",
        "dynamo_work_handler_pool_active_tasks",
        "dynamo_work_handler_pool_capacity",
        "dynamo_work_handler_enqueue_rejected_total",
        "dynamo_work_handler_permit_wait_seconds",
        "dynamo_work_handler_network_transit_seconds",
        "dynamo_work_handler_time_to_first_response_seconds",
        "dynamo_request_plane_queue_seconds",
        "dynamo_request_plane_send_seconds",
        "dynamo_request_plane_roundtrip_ttft_seconds",
        "dynamo_request_plane_inflight_requests",
        "dynamo_request_plane_quarantined_instances",
        "dynamo_request_plane_quarantines_total",
        "dynamo_request_plane_probes_total",
    }


def test_uptime_is_asked_for_at_each_scrape() -> None:
    registry, now = MetricsRegistry(), [100.0]
    register_uptime(registry, "1f", clock=lambda: now[0])
    now[0] = 103.5
    assert 'dynamo_component_uptime_seconds{worker_id="1f"} 3.5' in lines(registry)


def test_the_output_is_sorted_and_foreign_text_is_sorted_in() -> None:
    registry = MetricsRegistry()
    registry.gauge("m", "Mine", {"own": "1"})
    registry.add_callback(lambda: "# HELP z Z\n# TYPE z gauge\nz 1\n# TYPE m gauge\nm 2\n# EOF\na_bare 3\n\n")
    registry.add_callback(lambda: b'# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 1\nh_count 1')
    assert lines(registry) == [
        "a_bare 3",
        "# TYPE h histogram",
        'h_bucket{le="+Inf"} 1',
        "h_sum 1",
        "h_count 1",
        "# HELP m Mine",
        "# TYPE m gauge",
        'm{own="1"} 0',
        "m 2",
        "# HELP z Z",
        "# TYPE z gauge",
        "z 1",
    ]


def test_typed_families_appear_unless_a_text_callback_gave_them() -> None:
    registry = MetricsRegistry()
    registry.add_callback(lambda: "# TYPE x_total counter\nx_total 5\n")
    registry.add_typed_callback(
        lambda: [
            ("x", "X", "counter", [("x_total", [], 5.0), ("x_created", [], 1.0)]),
            ("y", "Y", "gauge", "seconds", [("y", [("a", "b")], 1.5, None)]),
        ]
    )
    assert lines(registry) == [
        "# TYPE x_total counter",
        "x_total 5",
        "# HELP y Y",
        "# TYPE y gauge",
        'y{a="b"} 1.5',
    ]


def test_a_failing_callback_is_logged_once_and_costs_only_its_own_metrics(caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry()
    registry.counter("a_total", "")

    def fail() -> str:
        raise RuntimeError("vendor")

    registry.add_callback(fail)
    assert "a_total 0" in lines(registry)
    assert "a_total 0" in lines(registry)
    assert len([r for r in caplog.records if "metrics callback" in r.message]) == 1


def test_a_label_that_grows_without_end_stops_growing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.runtime.observe.metrics.registry.MAX_SERIES", 3)
    registry = MetricsRegistry()
    vector = registry.counter_vector("a_total", "", ["model"])
    for n in range(10):
        vector.labels(f"m{n}").inc()
    assert len([line for line in lines(registry) if line.startswith("a_total{")]) == 3
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="3 series"):
        registry.counter("a_total", "", {"model": "x"})


@each_case("kind", ["counter", "gauge", "histogram"])
def test_a_family_beyond_its_bound_counts_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    monkeypatch.setattr("dynamo.runtime.observe.metrics.registry.MAX_SERIES", 3)
    registry, family, before = MetricsRegistry(), Family(f"a_{kind}", kind, "", ("model",)), len(caplog.records)
    for n in range(10):
        getattr(family, kind)(registry, {"model": f"m{n}"})
    (found,) = registry.families()
    assert len(found[3]) == 3
    assert len(caplog.records) - before == 1


def test_series_are_forgotten_by_the_labels_that_they_begin_with() -> None:
    registry = MetricsRegistry()
    for space in ("a", "ab"):
        registry.gauge("one", "", {"space": space})
        registry.gauge("one", "", {"space": space, "kind": "x"})
        registry.gauge("other", "", {"space": space})
    registry.forget(["one", "absent"], {"space": "a"})
    assert {name: [labels for labels, _ in series] for name, _, _, series in registry.families()} == {
        "one": ['space="ab"', 'space="ab",kind="x"'],
        "other": ['space="a"', 'space="ab"'],
    }


def test_a_removed_series_is_gone() -> None:
    registry = MetricsRegistry()
    registry.remove(registry.gauge("a", ""))
    assert registry.expose() == b""


@each_case(("name", "clean"), [("a.b-c", "a_b_c"), ("1a", "_1a"), ("", "_"), ("a:b", "a:b")])
def test_names_are_sanitised(name: str, clean: str) -> None:
    assert sanitize(name) == clean


NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**70), 2**70)


@given(value=NUMBERS, label=st.text())
def test_what_is_written_is_read_back(value: float, label: str) -> None:
    registry = MetricsRegistry()
    registry.gauge("g", "help\nwith \\ lines", {"x": label}).set(value)
    # A lone "\r" or other exotic line end is kept by the format, but the parser's own splitting must not see it.
    text = registry.expose().decode("utf-8", "surrogatepass")
    [family] = text_string_to_metric_families(text)
    [sample] = family.samples
    assert sample.value == float(value)
    assert sample.labels == ({"x": label} if label else {})


@given(values=st.lists(st.floats(0, 1000), max_size=50))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    registry = MetricsRegistry()
    histogram = registry.histogram("h", "", buckets=(1.0, 10.0, 100.0))
    for value in values:
        histogram.observe(value)
    below: Callable[[float], int] = lambda bound: sum(value <= bound for value in values)  # noqa: E731
    found = dict(line.rsplit(" ", 1) for line in lines(registry) if not line.startswith("#"))
    assert [found[f'h_bucket{{le="{bound}"}}'] for bound in ("1", "10", "100", "+Inf")] == [
        str(below(1)), str(below(10)), str(below(100)), str(len(values)),
    ]  # fmt: skip
    assert (histogram.count, float(found["h_sum"])) == (len(values), pytest.approx(sum(values)))


# -- families


def test_a_family_registers_what_it_says_and_continues_what_is_there() -> None:
    registry = MetricsRegistry()
    family = Family("x_total", "counter", "Things, see [a page](page.md)", ("a", "b")).under("p")
    family.counters(registry, {"a": "1"}).labels("2").inc()
    family.counters(registry, {"a": "1"}).labels("2").inc()
    assert lines(registry) == [
        "# HELP p_x_total Things, see a page",
        "# TYPE p_x_total counter",
        'p_x_total{a="1",b="2"} 2',
    ]


# -- the process


def test_a_process_exposes_what_the_kernel_knows_of_it() -> None:
    registry = MetricsRegistry()
    register_process(registry)
    found = {line.split()[0]: float(line.split()[1]) for line in lines(registry) if not line.startswith("#")}
    assert 0 < found["process_resident_memory_bytes"] < found["process_virtual_memory_bytes"]
    assert 0 < found["process_open_fds"] <= found["process_max_fds"]
    assert 0 < found["process_start_time_seconds"] <= time.time()
    assert found["process_cpu_seconds_total"] > 0


def test_an_engine_that_exposes_its_process_itself_is_not_contradicted() -> None:
    registry = MetricsRegistry()
    register_process(registry)
    registry.add_callback(lambda: "# TYPE process_open_fds gauge\nprocess_open_fds 7\n")
    assert [line for line in lines(registry) if line.startswith("process_open_fds")] == ["process_open_fds 7"]


def test_without_a_proc_only_the_cpu_time_is_known(tmp_path: Path) -> None:
    assert process_values(tmp_path).keys() == {"cpu"}
