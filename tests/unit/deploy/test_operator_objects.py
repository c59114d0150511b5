"""The objects for clusters with the native operator keep each rule of its admission, and the canary runs in the pods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo.runtime.base.settings import CanarySettings
from dynamo.settings.table import read_settings
from support.operator_admission import (
    CANARY,
    MAX_COMPONENTS,
    TYPES,
    admission_errors,
    canary_of,
    image_version,
    main_container,
    runtime_version,
)

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
GRAPH: dict[str, Any] = yaml.safe_load((FOLDER / "graph-deployment.yaml").read_text())
COMPONENT: dict[str, Any] = yaml.safe_load((FOLDER / "component-deployment.yaml").read_text())


def components() -> Iterator[dict[str, Any]]:
    yield from GRAPH["spec"]["components"]
    yield COMPONENT["spec"]


@pytest.mark.parametrize("found", [GRAPH, COMPONENT], ids=lambda found: found["kind"])
def test_an_object_for_the_operator_is_admitted(found: dict[str, Any]) -> None:
    assert admission_errors(found) == []


def test_the_version_is_written_where_the_image_s_tag_is_not_one() -> None:
    for component in components():
        container = main_container(component)
        assert container is not None
        assert (image_version(container["image"]) is None) == ("runtimeVersionOverride" in component)
        assert runtime_version(component) is not None


def test_the_canary_runs_in_every_worker_s_pod() -> None:
    """By its variable, which wins, and by the version; so does that of the deployments without an operator."""
    for component in components():
        assert canary_of(component) == ("true", 3), component["name"]
        container = main_container(component)
        assert container is not None
        if component["type"] == "worker":
            assert {"name": CANARY, "value": "true"} in container["env"]
    assert read_settings(CanarySettings, {CANARY: "true"}, {}).enabled
    worker, *_ = yaml.safe_load_all((FOLDER / "worker.yaml").read_text())
    assert {"name": CANARY, "value": "true"} in worker["spec"]["template"]["spec"]["containers"][0]["env"]


def test_no_framework_is_claimed_for_an_engine_that_the_operator_does_not_know() -> None:
    assert "backendFramework" not in GRAPH["spec"]
    assert "backendFramework" not in COMPONENT["spec"]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("registry/dynamo:1.4.0", (1, 4, 0)),
        ("registry:5000/dynamo:v1.4.0", (1, 4, 0)),
        ("dynamo:1.4.0-cuda13", (1, 4, 0)),
        ("dynamo:1.6.1@sha256:0123", (1, 6, 1)),
        ("dynamo", None),
        ("registry:5000/dynamo", None),
        ("dynamo@sha256:0123", None),
        ("dynamo:latest", None),
        ("dynamo:main", None),
        ("dynamo:sha-0123abc", None),
        ("dynamo:cuda13-1.4.0", None),
    ],
)
def test_a_tag_is_a_version_or_it_is_not(image: str, version: tuple[int, int, int] | None) -> None:
    assert image_version(image) == version


@pytest.mark.parametrize(
    ("override", "image", "canary"),
    [
        ("1.4.0", "dynamo", ("true", 3)),
        ("1.3.9", "dynamo:1.6.1", ("false", 1)),
        (None, "dynamo:1.6.1", ("true", 3)),
        (None, "dynamo:0.2.0", ("false", 1)),
        (None, "dynamo:latest", ("false", 1)),
    ],
)
def test_the_canary_goes_by_the_version(override: str | None, image: str, canary: tuple[str, int]) -> None:
    component: dict[str, Any] = {"podTemplate": {"spec": {"containers": [{"name": "main", "image": image, "env": []}]}}}
    if override is not None:
        component["runtimeVersionOverride"] = override
    assert canary_of(component) == canary
    main_env = component["podTemplate"]["spec"]["containers"][0]["env"]
    main_env.append({"name": CANARY, "value": "true"})
    assert canary_of(component) == ("true", canary[1])


def first(found: dict[str, Any]) -> Any:
    return found["spec"]["components"][0]


def containers(found: dict[str, Any]) -> Any:
    return first(found)["podTemplate"]["spec"]["containers"]


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda found: found.update(apiVersion="nvidia.com/v1alpha1"), "apiVersion"),
    "kind": (lambda found: found.update(kind="DynamoGraph"), "kind 'DynamoGraph'"),
    "no name": (lambda found: found["metadata"].clear(), "metadata.name"),
    "framework": (lambda found: found["spec"].update(backendFramework="custom"), "backendFramework 'custom'"),
    "field": (lambda found: found["spec"].update(services={}), "spec has no services"),
    "none": (lambda found: found["spec"].update(components=[]), "1 to 25, got 0"),
    "restart": (lambda found: found["spec"].update(restart={"id": "1"}), "spec.restart"),
    "twice": (
        lambda found: found["spec"]["components"].append({**first(found), "name": "WORKER"}),
        "'worker' is there",
    ),
    "component's name": (lambda found: first(found).update(name="a_b"), "letters, digits and dashes"),
    "long name": (lambda found: first(found).update(name="a" * 64), "letters, digits and dashes"),
    "component's field": (lambda found: first(found).update(componentType="worker"), "has no componentType"),
    "type": (lambda found: first(found).update(type="aggregated"), "type must be one of"),
    "replicas": (lambda found: first(found).update(replicas=-1), "must not be negative"),
    "available": (lambda found: first(found).update(minAvailable=3), "minAvailable"),
    "nodes": (lambda found: first(found).update(multinode={"nodeCount": 1}), "nodeCount"),
    "epp": (lambda found: first(found).update(eppConfig={"config": {}}), "is for the type epp"),
    "epp's two": (
        lambda found: first(found).update(type="epp", eppConfig={"config": {}, "configMapRef": {}}),
        "exactly one of",
    ),
    "no main": (lambda found: containers(found)[0].update(name="engine"), "a container named main"),
    "no image": (lambda found: containers(found)[0].pop("image"), "a container named main"),
    "no override": (lambda found: first(found).pop("runtimeVersionOverride"), "runtimeVersionOverride is required"),
    "override with v": (lambda found: first(found).update(runtimeVersionOverride="v1.6.1"), "MAJOR.MINOR.PATCH"),
    "prerelease": (lambda found: first(found).update(runtimeVersionOverride="1.6.1-rc1"), "MAJOR.MINOR.PATCH"),
    "five digits": (lambda found: first(found).update(runtimeVersionOverride="12345.0.0"), "MAJOR.MINOR.PATCH"),
    "sidecar": (lambda found: first(found).update(frontendSidecar="proxy"), "frontendSidecar 'proxy'"),
    "init sidecar": (lambda found: first(found).update(dynamoSidecar="agent"), "dynamoSidecar 'agent'"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_an_object_that_breaks_a_rule_is_refused_for_it(name: str) -> None:
    spoil, message = SPOILT[name]
    found = copy.deepcopy(GRAPH)
    spoil(found)
    errors = admission_errors(found)
    assert [error for error in errors if message in error], errors


def test_the_counts_of_components_are_bounded() -> None:
    found = copy.deepcopy(GRAPH)
    one = first(found)
    found["spec"]["components"] = [{**one, "name": f"epp-{number}", "type": "epp"} for number in range(2)]
    assert admission_errors(found) == ["spec.components: more than one is of the type epp"]
    found["spec"]["components"] = [{**one, "name": f"worker-{number}"} for number in range(MAX_COMPONENTS + 1)]
    assert admission_errors(found) == [f"spec.components: 1 to {MAX_COMPONENTS}, got {MAX_COMPONENTS + 1}"]
    assert one["type"] in TYPES


def test_a_component_by_itself_has_the_rules_of_one_in_a_graph() -> None:
    found = copy.deepcopy(COMPONENT)
    del found["spec"]["runtimeVersionOverride"]
    found["spec"]["services"] = {}
    errors = admission_errors(found)
    assert [error.partition(" ")[0] for error in errors] == ["spec", "spec.runtimeVersionOverride"]
