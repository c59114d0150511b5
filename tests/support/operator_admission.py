"""What the operator of the native system admits of its objects, as its published types and documents describe it.

No operator runs here: these are the rules as data and small functions, to hold manifests against. `admission_errors` returns one
sentence for each rule that an object breaks on its creation; `canary_of` is what the operator sets in the pods of a component.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

API_VERSION: Final = "nvidia.com/v1beta1"
MAX_COMPONENTS: Final = 25
TYPES: Final = frozenset({"frontend", "worker", "prefill", "decode", "planner", "epp"})
FRAMEWORKS: Final = frozenset({"sglang", "vllm", "trtllm"})
GRAPH_FIELDS: Final = frozenset(
    {
        "components", "backendFramework", "env", "annotations", "labels", "priorityClassName", "restart",
        "topologyConstraint", "providerOverride", "experimental",
    }
)  # fmt: skip
COMPONENT_FIELDS: Final = frozenset(
    {
        "name", "type", "replicas", "minAvailable", "podTemplate", "runtimeVersionOverride", "multinode",
        "sharedMemorySize", "globalDynamoNamespace", "modelRef", "scalingAdapter", "frontendSidecar", "dynamoSidecar",
        "eppConfig", "compilationCache", "experimental",
    }
)  # fmt: skip
MAIN: Final = "main"
CANARY: Final = "DYN_HEALTH_CHECK_ENABLED"
CANARY_SINCE: Final = (1, 4, 0)

_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,63}")
_OVERRIDE: Final = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")
_TAG: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:[-+].*)?")

Version = tuple[int, int, int]


def image_version(image: str) -> Version | None:
    """Return the version that the tag of an image is; None for no tag, a digest alone, or a tag that is not one."""
    named = image.partition("@")[0]
    _, colon, tag = named.rpartition(":")
    if not colon or "/" in tag:  # a port of a registry
        return None
    found = _TAG.fullmatch(tag)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def main_container(component: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the container that the operator merges its own with."""
    containers = component.get("podTemplate", {}).get("spec", {}).get("containers", ())
    return next((each for each in containers if each.get("name") == MAIN), None)


def runtime_version(component: Mapping[str, Any]) -> Version | None:
    """Return the version of the runtime by which the operator treats a component; None: it does not know it."""
    override = component.get("runtimeVersionOverride")
    if override is not None:
        return image_version(f"image:{override}")
    container = main_container(component)
    return None if container is None else image_version(container.get("image", ""))


def canary_of(component: Mapping[str, Any]) -> tuple[str, int]:
    """Return the canary's switch in the pods of a component, and how often their liveness probe may fail."""
    version = runtime_version(component)
    is_new = version is not None and version >= CANARY_SINCE
    own = next((each for each in (main_container(component) or {}).get("env", ()) if each["name"] == CANARY), None)
    switch = "true" if is_new else "false"
    return (own["value"] if own is not None else switch), 3 if is_new else 1


def admission_errors(found: Mapping[str, Any]) -> list[str]:
    """Return what speaks against creating this object."""
    spec: Mapping[str, Any] = found.get("spec", {})
    errors = [] if found.get("apiVersion") == API_VERSION else [f"apiVersion must be {API_VERSION}"]
    if not found.get("metadata", {}).get("name"):
        errors.append("metadata.name is missing")
    if spec.get("backendFramework", "vllm") not in FRAMEWORKS:
        errors.append(f"spec.backendFramework {spec['backendFramework']!r} is not one of {sorted(FRAMEWORKS)}")
    match found.get("kind"):
        case "DynamoGraphDeployment":
            errors += _graph_errors(spec)
        case "DynamoComponentDeployment":
            inline = {name: value for name, value in spec.items() if name != "backendFramework"}
            errors += _component_errors(inline, "spec")
        case kind:
            errors.append(f"kind {kind!r} is not known")
    return errors


def _graph_errors(spec: Mapping[str, Any]) -> Iterator[str]:
    components = spec.get("components") or []
    if unknown := sorted(spec.keys() - GRAPH_FIELDS):
        yield f"spec has no {', '.join(unknown)}"
    if not 0 < len(components) <= MAX_COMPONENTS:
        yield f"spec.components: 1 to {MAX_COMPONENTS}, got {len(components)}"
    names = [str(each.get("name", "")).lower() for each in components]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"spec.components: {name!r} is there more than once"
    if sum(each.get("type") == "epp" for each in components) > 1:
        yield "spec.components: more than one is of the type epp"
    if "restart" in spec:
        yield "spec.restart must be absent on creation"
    for number, component in enumerate(components):
        yield from _component_errors(component, f"spec.components[{number}]")


def _component_errors(component: Mapping[str, Any], where: str) -> Iterator[str]:
    if unknown := sorted(component.keys() - COMPONENT_FIELDS):
        yield f"{where} has no {', '.join(unknown)}"
    if not _NAME.fullmatch(str(component.get("name", ""))):
        yield f"{where}.name must be 1 to 63 letters, digits and dashes"
    if component.get("type") not in TYPES:
        yield f"{where}.type must be one of {sorted(TYPES)}"
    replicas = component.get("replicas", 1)
    if replicas < 0:
        yield f"{where}.replicas must not be negative"
    if not 1 <= component.get("minAvailable", 1) <= max(replicas, 1):
        yield f"{where}.minAvailable must be in 1..replicas"
    if component.get("multinode", {}).get("nodeCount", 2) < 2:
        yield f"{where}.multinode.nodeCount must be at least 2"
    if "eppConfig" in component:
        yield from _epp_errors(component, where)
    yield from _pod_errors(component, where)


def _epp_errors(component: Mapping[str, Any], where: str) -> Iterator[str]:
    if component.get("type") != "epp":
        yield f"{where}.eppConfig is for the type epp"
    if len(component["eppConfig"].keys() & {"config", "configMapRef"}) != 1:
        yield f"{where}.eppConfig must have exactly one of config and configMapRef"


def _pod_errors(component: Mapping[str, Any], where: str) -> Iterator[str]:
    pod = component.get("podTemplate", {}).get("spec", {})
    container = main_container(component)
    if container is None or not container.get("image"):
        yield f"{where}.podTemplate needs a container named {MAIN} with an image"
    override = component.get("runtimeVersionOverride")
    if override is not None and not _OVERRIDE.fullmatch(str(override)):
        yield f"{where}.runtimeVersionOverride must be MAJOR.MINOR.PATCH, got {override!r}"
    elif override is None and container is not None and image_version(container.get("image", "")) is None:
        yield f"{where}.runtimeVersionOverride is required: the tag of {container.get('image')!r} is not a version"
    if (sidecar := component.get("frontendSidecar")) and sidecar not in [
        each["name"] for each in pod.get("containers", ())
    ]:
        yield f"{where}.frontendSidecar {sidecar!r} is not the name of a container"
    if (sidecar := component.get("dynamoSidecar")) and sidecar not in [
        each["name"] for each in pod.get("initContainers", ()) if each.get("restartPolicy") == "Always"
    ]:
        yield f"{where}.dynamoSidecar {sidecar!r} is not the name of an init container that restarts"
