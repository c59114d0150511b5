"""The deploy files are well-formed, name only what exists, and leave every process the time that it takes to drain."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import msgspec
import pytest
import yaml

from dynamo.frontend.args import parse_args
from dynamo.frontend.http.settings import default_paths
from dynamo.frontend.parts.scaling.gauges import AUTOSCALE_PREFIX, FAMILIES
from dynamo.frontend.parts.scaling.part import AUTOSCALE_PATH
from dynamo.frontend.parts.scaling.signals import RoleSignal
from dynamo.runtime.base.settings import SystemSettings
from dynamo.runtime.discovery.kubernetes.records import GROUP, KIND, PLURAL, SELECTOR, VERSION
from support.cases import each_case
from support.operator_admission import admission_errors

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = [
    document
    for path in sorted([*(DEPLOY / "kubernetes").glob("*.yaml"), *(DEPLOY / "overlays").glob("*/*.yaml")])
    for document in yaml.safe_load_all(path.read_text())
]
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SETTINGS = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("settings", "discovery"))

MODELS = {
    "Deployment": "V1Deployment",
    "Service": "V1Service",
    "ServiceAccount": "V1ServiceAccount",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "CustomResourceDefinition": "V1CustomResourceDefinition",
    "NetworkPolicy": "V1NetworkPolicy",
}


def components_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the components of an object of the native operator."""
    spec: dict[str, Any] = found["spec"]
    return spec["components"] if found["kind"] == "DynamoGraphDeployment" else [spec]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in MANIFESTS if found["kind"] == kind}


# -- shapes --------------------------------------------------------------------------------------------------------------


def check(value: Any, kind: str, where: str) -> None:
    """Compare a value with a type of the API as the client library describes it: no unknown key, every required one."""
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, each in enumerate(value):
            check(each, kind[5:-1], f"{where}[{number}]")
    elif kind.startswith("dict("):
        assert isinstance(value, dict), where
        for key, each in value.items():
            assert isinstance(key, str), f"{where}: {key!r} needs quotes"
            check(each, kind[5:-1].split(", ", 1)[1], f"{where}.{key}")
    elif kind in ("str", "int", "bool", "float"):
        expected: Any = {"str": str, "int": int, "bool": bool, "float": (int, float)}[kind]
        assert isinstance(value, expected), f"{where}: {value!r} is no {kind}"
        assert kind == "bool" or not isinstance(value, bool), f"{where}: {value!r} is no {kind}"
    elif kind != "object":
        import kubernetes_asyncio.client  # here: it takes a second, and only the worker that runs this pays

        model = getattr(kubernetes_asyncio.client, kind)
        assert isinstance(value, dict), where
        names = {attribute: name for name, attribute in model.attribute_map.items()}
        unknown = value.keys() - names.keys()
        assert not unknown, f"{where}: {kind} has no {sorted(unknown)}"
        for key, each in value.items():
            check(each, model.openapi_types[names[key]], f"{where}.{key}")
        model(**{names[key]: each for key, each in value.items()})  # raises ValueError for what is missing


@each_case("found", MANIFESTS, ids=lambda found: f"{found['kind']}-{found.get('metadata', {}).get('name')}")
def test_a_manifest_has_the_shape_of_the_api(found: dict[str, Any]) -> None:
    if found["kind"] in ("Kustomization", "Component"):
        places = [DEPLOY / "kubernetes", *(DEPLOY / "overlays").iterdir()]
        for name in (*found.get("resources", ()), *found.get("components", ())):
            assert [place for place in places if (place / name).exists()], name
    elif found["kind"] in ("DynamoGraphDeployment", "DynamoComponentDeployment"):
        assert admission_errors(found) == []  # each rule by itself: test_operator_objects.py
        for component in components_of(found):
            check(component["podTemplate"], "V1PodTemplateSpec", component["name"])
    elif found["kind"] == "ScaledObject":
        jsonschema.validate(found, SCALED_OBJECT_SCHEMA)
        check(found["metadata"], "V1ObjectMeta", "metadata")
        behavior = found["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        check(behavior, "V2HorizontalPodAutoscalerBehavior", "behavior")
    elif found["kind"] in ("ServiceMonitor", "PodMonitor"):
        jsonschema.validate(found, MONITOR_SCHEMA)
        check(found["metadata"], "V1ObjectMeta", "metadata")
    else:
        check(found, MODELS[found["kind"]], found["kind"])


def test_the_check_of_shapes_can_fail() -> None:
    good = of_kind("Deployment")["dynamo-worker"]
    for spoilt in (
        {**good, "spce": {}},
        {**good, "spec": {**good["spec"], "replicas": "2"}},
        {**good, "spec": {key: value for key, value in good["spec"].items() if key != "selector"}},
    ):
        with pytest.raises((AssertionError, ValueError)):
            check(spoilt, "V1Deployment", "Deployment")


# As KEDA documents its resource, of what is used here: every value of a trigger's metadata is a text.
SCALED_OBJECT_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["scaleTargetRef", "triggers"],
            "properties": {
                "scaleTargetRef": {"type": "object", "required": ["name"]},
                "minReplicaCount": {"type": "integer", "minimum": 0},
                "maxReplicaCount": {"type": "integer", "minimum": 1},
                "pollingInterval": {"type": "integer", "minimum": 1},
                "cooldownPeriod": {"type": "integer", "minimum": 0},
                "advanced": {"type": "object"},
                "triggers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["type", "metadata"],
                        "properties": {
                            "type": {"const": "metrics-api"},
                            "metricType": {"enum": ["AverageValue", "Value"]},
                            "metadata": {
                                "type": "object",
                                "additionalProperties": {"type": "string"},
                                "required": ["url", "valueLocation", "targetValue"],
                            },
                        },
                    },
                },
            },
        },
    },
}


_ENDPOINTS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["port"],
        "properties": {
            "port": {"type": "string"},
            "path": {"type": "string"},
            "interval": {"type": "string", "pattern": r"^\d+s$"},
        },
    },
}
# As the Prometheus operator documents its resources, of what is used here.
MONITOR_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"enum": ["ServiceMonitor", "PodMonitor"]},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector"],
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "endpoints": _ENDPOINTS,
                "podMetricsEndpoints": _ENDPOINTS,
            },
        },
    },
}


def test_monitors_and_policies_name_labels_and_ports_that_there_are() -> None:
    (port,) = of_kind("ServiceMonitor")["dynamo-frontend"]["spec"]["endpoints"]
    service = of_kind("Service")["dynamo-frontend"]
    assert (
        of_kind("ServiceMonitor")["dynamo-frontend"]["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    )
    assert port["port"] in {each["name"] for each in service["spec"]["ports"]}
    monitor = of_kind("PodMonitor")["dynamo-worker"]["spec"]
    (port,) = monitor["podMetricsEndpoints"]
    pods = {name: found["spec"]["template"] for name, found in of_kind("Deployment").items()}
    assert monitor["selector"]["matchLabels"] == pods["dynamo-worker"]["metadata"]["labels"]
    names = {name: {each["name"] for each in pod["spec"]["containers"][0]["ports"]} for name, pod in pods.items()}
    assert port["port"] in names["dynamo-worker"]
    policies = of_kind("NetworkPolicy")
    assert policies.keys() == pods.keys()
    for name, policy in policies.items():
        assert policy["spec"]["podSelector"]["matchLabels"] == pods[name]["metadata"]["labels"]
        everybody, ours = policy["spec"]["ingress"]
        assert {each["port"] for each in everybody["ports"]} <= names[name]
        # Workers connect back to frontends, and to each other, at ports that no file names.
        assert ours.keys() == {"from"}
        (among,) = ours["from"][0]["podSelector"]["matchExpressions"]
        assert set(among["values"]) == {pod["metadata"]["labels"]["app"] for pod in pods.values()}


def test_a_pod_writes_only_where_it_may_and_has_no_right_to_more() -> None:
    for found in of_kind("Deployment").values():
        pod = found["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == "/tmp"
        assert {each["name"] for each in pod["volumes"] if "emptyDir" in each} == {mount["name"]}


def test_the_autoscalers_find_what_the_frontend_gives() -> None:
    """The value that the manifest names is in the answer, and the metric and its labels are in the table."""
    trigger = of_kind("ScaledObject")["dynamo-worker"]["spec"]["triggers"][0]["metadata"]
    assert trigger["valueLocation"] in {entry.name for entry in msgspec.structs.fields(RoleSignal)}
    address = urlsplit(trigger["url"])
    assert address.path == AUTOSCALE_PATH + "/test-model"
    service = of_kind("Service")[str(address.hostname).split(".")[0]]
    assert (address.port or 80) in {each["port"] for each in service["spec"]["ports"]}
    metric = of_kind("HorizontalPodAutoscaler")["dynamo-worker"]["spec"]["metrics"][0]["external"]["metric"]
    family = next(each for each in FAMILIES if each.under(AUTOSCALE_PREFIX).name == metric["name"])
    assert metric["selector"]["matchLabels"].keys() <= set(family.labels)


SERVICE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "command"],
    "properties": {
        "image": {"type": "string"},
        "build": {"type": "object", "additionalProperties": False, "required": ["context", "dockerfile"],
                  "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}}},
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^\d+:\d+$"}},
        "volumes": {"type": "array", "items": {"type": "string"}},
        "restart": {"enum": ["unless-stopped"]},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
        "depends_on": {"type": "object", "additionalProperties": {
            "type": "object", "additionalProperties": False,
            "properties": {"condition": {"enum": ["service_started", "service_healthy"]}}}},
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test"],
            "properties": {
                "test": {"type": "array", "prefixItems": [{"const": "CMD"}], "items": {"type": "string"}},
                **{name: {"type": "string", "pattern": r"^\d+s$"} for name in ("interval", "timeout", "start_period")},
                "retries": {"type": "integer"},
            },
        },
    },
}  # fmt: skip


@each_case("name", COMPOSE["services"])
def test_a_service_of_the_compose_file_has_the_shape_it_should(name: str) -> None:
    service = COMPOSE["services"][name]
    jsonschema.validate(service, SERVICE_SCHEMA)
    for other, how in service.get("depends_on", {}).items():
        assert how["condition"] != "service_healthy" or "healthcheck" in COMPOSE["services"][other]
    for volume in service.get("volumes", ()):
        assert volume.split(":")[0] in COMPOSE["volumes"]


MOCKER = [yaml.safe_load((DEPLOY / "mocker" / f"docker-compose{kind}.yml").read_text()) for kind in ("", ".auth")]


def test_the_mocker_s_compose_files_have_the_shape_they_should_and_name_what_exists() -> None:
    conditions = ("service_started", "service_healthy", "service_completed_successfully")
    known = MOCKER[0]["services"].keys() | MOCKER[1]["services"].keys()
    used: set[str] = set()
    for service in (each for file in MOCKER for each in file["services"].values()):
        assert service.keys() <= SERVICE_SCHEMA["properties"].keys() | {"networks", "tmpfs"}
        assert set(service.get("networks", ())) <= MOCKER[0]["networks"].keys()
        for other, how in service.get("depends_on", {}).items():
            assert other in known
            assert how["condition"] in conditions
        if build := service.get("build"):
            assert (DEPLOY / "mocker" / build["context"]).resolve() == ROOT
            lines = (ROOT / build["dockerfile"]).read_text()
            sources = [
                word for each in re.findall(r"^COPY (?!--)(.+) \S+$", lines, re.MULTILINE) for word in each.split()
            ]
            assert sources
            assert all((ROOT / source).exists() for source in sources)
            assert {f"!{source}" for source in sources} <= set((ROOT / ".dockerignore").read_text().splitlines())
        used |= service.get("environment", {}).keys()
    assert {name for name in used if re.search(rf"\b{name}\b", SETTINGS) is None} == set()


# -- what they name exists -----------------------------------------------------------------------------------------------


def containers() -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(name, container, pod spec) of every process of ours."""
    for name, found in of_kind("Deployment").items():
        pod = found["spec"]["template"]["spec"]
        yield name, pod["containers"][0], pod
    for kind in ("DynamoGraphDeployment", "DynamoComponentDeployment"):
        for found in of_kind(kind).values():
            for component in components_of(found):
                pod = component["podTemplate"]["spec"]
                yield component["name"], pod["containers"][0], pod


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "from the pod") for each in container["env"]}


def test_every_variable_of_ours_is_documented() -> None:
    used = {name for _, container, _ in containers() for name in environment(container)}
    used |= {name for service in COMPOSE["services"].values() for name in service.get("environment", {})}
    assert {name for name in used if re.search(rf"\b{name}\b", SETTINGS) is None} == set()


def test_every_command_is_one_that_the_compose_file_runs() -> None:
    """Those run in tests/process/deploy/test_compose_processes.py."""
    run = [service["command"] for service in COMPOSE["services"].values()]
    assert all(container["command"] in run for _, container, _ in containers())


def test_the_image_holds_what_the_files_need() -> None:
    lines = (DEPLOY / "Containerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.search(r'pip install --no-cache-dir "\.\[([a-z,]+)\]"', lines)
    assert installed is not None
    assert set(installed[1].split(",")) <= extras.keys()
    assert {"etcd", "nats", "kubernetes", "reference", "guided"} <= set(installed[1].split(","))
    assert "ENV DYN_HTTP_HOST=0.0.0.0" in lines  # else `dynamo serve` in a container would answer only inside of it
    for sources in re.findall(r"^COPY (.+) \S+$", lines, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
        assert {f"!{source}" for source in sources.split()} <= set((ROOT / ".dockerignore").read_text().splitlines())
    build = COMPOSE["services"]["frontend"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"
    user = re.search(r"--uid (\d+)", lines)
    assert user is not None
    assert {pod["securityContext"]["runAsUser"] for _, _, pod in containers() if "securityContext" in pod} == {
        int(user[1])
    }


def test_ports_are_those_that_the_processes_listen_on() -> None:
    frontend = of_kind("Deployment")["dynamo-frontend"]["spec"]["template"]["spec"]["containers"][0]
    settings = parse_args(frontend["command"][3:], env={})
    assert frontend["ports"][0]["containerPort"] == settings.http_port
    assert COMPOSE["services"]["frontend"]["ports"] == [f"8000:{settings.http_port}"]
    worker = of_kind("Deployment")["dynamo-worker"]["spec"]["template"]["spec"]["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    said = environment(worker)
    assert ports == {"status": int(said["DYN_SYSTEM_PORT"]), "requests": int(said["DYN_TCP_RPC_PORT"])}
    assert of_kind("Service")["dynamo-worker"]["spec"]["ports"][0]["port"] == ports["requests"]


def test_probes_ask_for_routes_that_there_are() -> None:
    for name, container, _ in containers():
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert len(probes) in (0, 3), name
        for probe in probes:
            status = SystemSettings()
            is_frontend = "frontend" in name
            routes = default_paths() if is_frontend else {"ready": status.health_path, "live": status.live_path}
            assert probe["httpGet"]["path"] in (routes["ready"], routes["live"])
            assert probe["httpGet"]["port"] in {port["name"] for port in container["ports"]}


# -- the end of a process ------------------------------------------------------------------------------------------------

MARGIN_SECONDS = 3


def drain_seconds(env: Mapping[str, str]) -> int:
    """From SIGTERM to a process's own deadline, as docs/architecture.md has it."""
    if "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS" in env:
        return int(env["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"])
    names = ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT")
    return sum(int(env[name]) for name in names)


def test_nobody_is_killed_before_its_own_deadline() -> None:
    for name, container, pod in containers():
        *words, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        assert words == (["sleep"] if "frontend" in name.lower() else ["dynamo", "drain", "--timeout"])
        # The status port of a pod is open to the network, and serves no admin routes.
        assert "frontend" in name.lower() or environment(container)["DYN_ADMIN_PORT"] > "0"
        needed = int(pause) + drain_seconds(environment(container)) + MARGIN_SECONDS
        assert pod["terminationGracePeriodSeconds"] >= needed, name
    for name, service in COMPOSE["services"].items():
        if "environment" in service:
            assert int(service["stop_grace_period"][:-1]) >= drain_seconds(service["environment"]) + MARGIN_SECONDS, (
                name
            )


def test_a_rollout_and_a_drained_node_leave_somebody_to_serve() -> None:
    budgets = of_kind("PodDisruptionBudget")
    for name, found in of_kind("Deployment").items():
        assert found["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        labels = found["spec"]["template"]["metadata"]["labels"]
        assert found["spec"]["selector"]["matchLabels"] == labels
        assert budgets[name]["spec"]["selector"]["matchLabels"] == labels
        assert budgets[name]["spec"]["minAvailable"] < found["spec"]["replicas"]
        assert of_kind("Service")[name]["spec"]["selector"] == labels


# -- discovery -----------------------------------------------------------------------------------------------------------


def test_the_rights_are_those_that_discovery_needs() -> None:
    rules = {rule["resources"][0]: rule for rule in of_kind("Role")["dynamo-discovery"]["rules"]}
    assert rules[PLURAL]["apiGroups"] == [GROUP]
    assert set(rules[PLURAL]["verbs"]) == {"get", "list", "watch", "create", "patch", "delete"}
    assert rules["endpointslices"]["apiGroups"] == ["discovery.k8s.io"]
    assert set(rules["endpointslices"]["verbs"]) == {"list", "watch"}
    assert "secrets" not in rules
    account = of_kind("RoleBinding")["dynamo-discovery"]["subjects"][0]["name"]
    assert account in of_kind("ServiceAccount")
    assert {found["spec"]["template"]["spec"]["serviceAccountName"] for found in of_kind("Deployment").values()} == {
        account
    }


def test_workers_can_be_found() -> None:
    labels = of_kind("Service")["dynamo-worker"]["metadata"]["labels"]
    assert ",".join(f"{name}={value}" for name, value in labels.items()) == SELECTOR
    definition = of_kind("CustomResourceDefinition")[f"{PLURAL}.{GROUP}"]["spec"]
    assert (definition["group"], definition["names"]["kind"], definition["names"]["plural"]) == (GROUP, KIND, PLURAL)
    assert [each["name"] for each in definition["versions"]] == [VERSION]
    for found in of_kind("Deployment").values():
        said = environment(found["spec"]["template"]["spec"]["containers"][0])
        assert {"POD_NAME", "POD_NAMESPACE", "POD_UID"} <= said.keys()


def test_every_file_is_used() -> None:
    listed = {
        DEPLOY / "kubernetes" / name
        for name in yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    }
    known = listed | {
        DEPLOY / "kubernetes" / name
        for name in (
            "kustomization.yaml",
            "graph-deployment.yaml",
            "component-deployment.yaml",
        )
    }
    overlays = DEPLOY / "overlays"
    known |= {overlays / name / "scaler.yaml" for name in ("hpa", "keda")}
    known |= {overlays / "monitoring" / "monitors.yaml", overlays / "network" / "policies.yaml"}
    known |= {overlays / name / "kustomization.yaml" for name in ("hpa", "keda", "monitoring", "network", "production")}
    known |= {DEPLOY / f"Containerfile{role}" for role in ("", ".backend", ".rust")} | {DEPLOY / "docker-compose.yml"}
    known |= {
        DEPLOY / "grafana" / name for name in ("frontend.json", "workers.json", "alerts.yaml", "alerts_test.yaml")
    }
    mocker = ("Containerfile.frontend", "Containerfile.backend", "docker-compose.yml", "docker-compose.auth.yml")
    known |= {DEPLOY / "mocker" / name for name in mocker}
    known |= {
        DEPLOY / "ready.sh",
        DEPLOY / "gateway" / "envoy.yaml",
    }  # test_oci_image.py, process/picker/test_gateway.py
    units = ("dynamo-frontend.service", "dynamo-serve.service", "dynamo-worker@.service", "dynamo.sysusers")
    known |= {DEPLOY / "systemd" / name for name in units}  # test_systemd.py
    assert {Path(folder) / name for folder, _, names in os.walk(DEPLOY) for name in names} == known
