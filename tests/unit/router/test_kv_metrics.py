"""The metrics of the kv mode: whose series there are, and until when."""

from __future__ import annotations

from dynamo.router.kv.metrics import MAX_GONE, EventCounters, KvMetrics, SeriesGroups
from dynamo.runtime.observe.metrics import MetricsRegistry


def labels_of(number: int) -> dict[str, str]:
    return {"dynamo_namespace": f"ns{number}", "dynamo_component": "decode", "router_id": "1"}


def spaces(registry: MetricsRegistry, metric: str) -> set[str]:
    (series,) = [series for name, _, _, series in registry.families() if name == metric]
    return {labels.split('"')[1] for labels, _ in series}


def test_series_of_namespaces_that_have_gone_stay_for_the_last_of_them() -> None:
    registry = MetricsRegistry()
    groups, metric = SeriesGroups(registry), "dynamo_component_router_requests_total"
    here = labels_of(-1)
    KvMetrics(registry, here, role="decode")
    groups.enter(here)
    for number in range(MAX_GONE + 5):
        KvMetrics(registry, labels_of(number), role="decode")
        leave, leave_too = groups.enter(labels_of(number)), groups.enter(labels_of(number))  # of two block sizes
        leave()
        assert f"ns{number}" in spaces(registry, metric)
        leave_too()
    assert spaces(registry, metric) == {"ns-1", *(f"ns{number}" for number in range(5, MAX_GONE + 5))}
    assert spaces(registry, "dynamo_component_router_ranks") == spaces(registry, metric)
    again = groups.enter(labels_of(5))  # one that has come back is not the oldest any more
    groups.enter(labels_of(1000))()
    assert "ns5" in spaces(registry, metric)
    again()


def test_so_do_those_of_components_whose_events_were_followed() -> None:
    registry = MetricsRegistry()
    groups, metric = SeriesGroups(registry), "dynamo_component_kv_cache_events_applied"
    domain = labels_of(0)
    KvMetrics(registry, domain, role="decode")
    groups.enter(domain)
    for number in range(MAX_GONE + 1):
        labels = {"dynamo_namespace": f"ns{number}", "dynamo_component": "decode"}
        EventCounters(registry, labels)
        groups.enter(labels)()
    assert spaces(registry, metric) == {f"ns{number}" for number in range(1, MAX_GONE + 1)}
    assert spaces(registry, "dynamo_component_router_requests_total") == {"ns0"}
