"""The dashboards and alert rules name metrics of the code, with labels and suffixes that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from dynamo.frontend.base.metrics.requests import CLIENTS_AND_LOAD
from support.doc_pages import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram) \| ([^|]*)\|", re.MULTILINE)
FAMILIES = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}
EVERYWHERE = {"le", "instance", "job"}  # of buckets, and what Prometheus adds
USE = re.compile(r"(?:\b(rate|increase)\()?\b((?:dynamo|process)_\w+)(?:\{([^}]*)\})?(\[[^\]]+\])?")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def expressions() -> Iterator[tuple[str, str]]:
    for path in sorted(GRAFANA.glob("*.json")):
        found = json.loads(path.read_text())
        for panel in found["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in found["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: {variable['name']}", variable["query"]
    for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alerts.yaml: {rule['alert']}", rule["expr"]


EXPRESSIONS = dict(expressions())


def mistakes(expression: str) -> list[str]:
    """What is wrong with the metrics of an expression."""
    found = []
    grouped = {
        label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")
    }
    known = set(EVERYWHERE)
    for rate, name, selector, _ in USE.findall(expression):
        is_part = SUFFIX.search(name) is not None and name not in FAMILIES
        family = FAMILIES.get(SUFFIX.sub("", name) if is_part else name)
        if family is None:
            found.append(f"there is no metric {name}")
            continue
        kind, labels = family
        known |= labels
        if (kind == "histogram") != is_part:
            found.append(f"{name} is a {kind}")
        if (kind == "gauge") == bool(rate) and "label_values" not in expression:
            found.append(f"{name} is a {kind}: {'a' if rate else 'no'} rate is taken of it")
        asked = re.findall(r"(\w+)\s*=", selector)
        found += [f"{name} has no label {label}" for label in asked if label not in labels | EVERYWHERE]
    found += [f"no metric has the label {label}" for label in sorted(grouped - known)]
    return found


def test_every_panel_and_rule_names_what_the_code_has() -> None:
    assert len(FAMILIES) > 100
    assert len(EXPRESSIONS) > 35
    assert {place: found for place, text in EXPRESSIONS.items() if (found := mistakes(text))} == {}


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("rate(dynamo_frontend_nothing_total[5m])", "there is no metric dynamo_frontend_nothing_total"),
        ("rate(dynamo_frontend_requests_total{modell='x'}[5m])", "dynamo_frontend_requests_total has no label modell"),
        ("dynamo_frontend_requests_total", "dynamo_frontend_requests_total is a counter: no rate is taken of it"),
        ("rate(dynamo_frontend_model_ready[5m])", "dynamo_frontend_model_ready is a gauge: a rate is taken of it"),
        ("dynamo_frontend_request_duration_seconds", "dynamo_frontend_request_duration_seconds is a histogram"),
        ("sum by (colour) (dynamo_frontend_model_ready)", "no metric has the label colour"),
    ],
)
def test_a_mistake_is_found(expression: str, mistake: str) -> None:
    assert mistake in mistakes(expression)


def test_legends_name_labels_that_are_there() -> None:
    for path in sorted(GRAFANA.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                grouped = re.search(r"\bby \(([^)]*)\)", target["expr"])
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    if grouped is not None:
                        assert label in grouped[1], (panel["title"], label)


def test_the_files_are_those_that_the_tables_make() -> None:
    dashboards = pytest.importorskip("dashboards")
    for name in dashboards.DASHBOARDS:
        assert json.loads((GRAFANA / f"{name}.json").read_text()) == dashboards.dashboard(name)


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed here (Debian: apt-get install prometheus)")
def test_the_alerts_fire_for_what_the_server_does_wrong_and_not_for_what_clients_do() -> None:
    assert PROMTOOL is not None
    command = [PROMTOOL, "test", "rules", "alerts_test.yaml"]
    done = subprocess.run(command, cwd=GRAFANA, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_error_rate_counts_what_the_frontend_counts_as_its_own_failures() -> None:
    excluded = re.search(r'error_type!~"([^"]+)"', EXPRESSIONS["alerts.yaml: DynamoErrorRate"])
    assert excluded is not None
    assert set(excluded[1].split("|")) == CLIENTS_AND_LOAD


def test_there_is_an_alert_for_each_trouble() -> None:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [
        "DynamoModelHasNoWorker", "DynamoErrorRate", "DynamoShedding", "DynamoFirstTokenSlow", "DynamoQueueOld",
        "DynamoKvCacheFull", "DynamoFrontendRestarts",
    ]  # fmt: skip
    for rule in group["rules"]:
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")
