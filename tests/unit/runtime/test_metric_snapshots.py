from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.observe.metric_snapshots import SnapshotError, absorb, snapshot
from dynamo.runtime.observe.metrics import MetricsRegistry

BUCKETS = (0.1, 1.0, 10.0)


def counted(events: list[tuple[str, float]], *, context_length: int = 0) -> MetricsRegistry:
    """A process that saw these (model, seconds)."""
    registry = MetricsRegistry()
    requests = registry.counter_vector("requests_total", "Requests", ("model",))
    seconds = registry.histogram_vector("seconds", "Seconds", ("model",), buckets=BUCKETS)
    inflight = registry.gauge("inflight", "Now")
    for model, value in events:
        requests.labels(model).inc()
        seconds.labels(model).observe(value)
        inflight.inc()
    if context_length:
        registry.gauge("model_context_length", "Tokens").set(context_length)
    return registry


def merged(*registries: MetricsRegistry, gauges: bool = True) -> bytes:
    total = MetricsRegistry()
    for registry in registries:
        absorb(total, snapshot(registry), is_fact=lambda name: name.startswith("model_"), gauges=gauges)
    return total.expose()


EVENTS = st.lists(st.tuples(st.sampled_from(["a", 'b"\\']), st.sampled_from([0.05, 0.1, 0.5, 5.0, 50.0])), max_size=8)


@given(EVENTS, EVENTS)
def test_two_processes_together_are_one_that_did_all_of_it(
    first: list[tuple[str, float]], second: list[tuple[str, float]]
) -> None:
    expected = {line for line in counted(first + second).expose().decode().splitlines() if "_sum" not in line}
    found = {line for line in merged(counted(first), counted(second)).decode().splitlines() if "_sum" not in line}
    assert found == expected


def test_a_gauge_that_states_a_fact_is_not_multiplied() -> None:
    both = merged(counted([], context_length=2048), counted([], context_length=2048))
    assert b"\nmodel_context_length 2048\n" in both


def test_what_an_ended_process_had_open_is_not_counted_on() -> None:
    text = merged(counted([("a", 0.5)]), gauges=False)
    assert b'requests_total{model="a"} 1' in text
    assert b"inflight" not in text


@pytest.mark.parametrize("encoded", [b"", b"\xc1", b"\x91\x93\xa1x\xa5blink\xa0"])
def test_what_is_no_snapshot_is_said_to_be_none(encoded: bytes) -> None:
    with pytest.raises(SnapshotError):
        absorb(MetricsRegistry(), encoded, is_fact=lambda _: False)


def test_histograms_of_other_buckets_do_not_add_up() -> None:
    other = MetricsRegistry()
    other.histogram("seconds", "Seconds", {"model": "a"}, buckets=(1.0, 2.0, 3.0)).observe(1)
    with pytest.raises(SnapshotError, match="other buckets"):
        merged(counted([("a", 0.5)]), other)
