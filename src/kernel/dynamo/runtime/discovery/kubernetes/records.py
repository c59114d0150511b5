"""How records lie in Kubernetes: one custom resource for each worker, counted in while its pod is ready. No I/O.

The shapes are the native ones: `DynamoWorkerMetadata` of `nvidia.com/v1alpha1`, `.spec.data` with one map for each bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.runtime.discovery.base import EVENT_CHANNELS, EVENT_SOURCES, INSTANCES, MODEL_CARDS
from dynamo.runtime.discovery.keys import split_key

GROUP: Final = "nvidia.com"
VERSION: Final = "v1alpha1"
KIND: Final = "DynamoWorkerMetadata"
PLURAL: Final = "dynamoworkermetadatas"

FIELDS: Final[Mapping[str, str]] = {
    INSTANCES: "endpoints",
    MODEL_CARDS: "model_cards",
    EVENT_CHANNELS: "event_channels",
    EVENT_SOURCES: "event_sources",
}

SELECTOR: Final = "nvidia.com/dynamo-discovery-backend=kubernetes,nvidia.com/dynamo-discovery-enabled=true"
"""Which EndpointSlices and pods are watched; the operator puts the labels on the service, or on the pods."""

_MASK: Final = (1 << 64) - 1
_ID_BITS: Final = 53  # ids stay exact in JSON readers that only know doubles


def check_record(key: str, value: bytes) -> None:
    """Raises InvalidArgument for a key of another bucket and a value that is no JSON: neither fits into the resource."""
    bucket, _ = split_key(key)
    if bucket not in FIELDS:
        raise InvalidArgument(f"discovery key {key!r}: the kubernetes store keeps {', '.join(FIELDS)} and nothing else")
    try:
        msgspec.json.decode(value)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"discovery key {key!r}: the kubernetes store keeps JSON values ({error})") from error


ApiObject = Mapping[str, Any]
"""An object as the API server gives it: JSON."""


def spec_of(own: Mapping[str, bytes]) -> dict[str, object]:
    """Build the `.spec` that holds these records."""
    data: dict[str, dict[str, object]] = {field: {} for field in FIELDS.values()}
    for key, value in own.items():
        bucket, inside = split_key(key)
        data[FIELDS[bucket]][inside] = msgspec.json.decode(value)
    return {"data": data}


def resource(name: str, *, pod_name: str, pod_uid: str, own: Mapping[str, bytes]) -> dict[str, object]:
    """Build the whole resource to apply; it is deleted with its pod."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid, "controller": False}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": spec_of(own),
    }


def records_of(found: ApiObject) -> dict[str, bytes]:
    """Key -> value of one resource; what has another shape is left out."""
    data = (found.get("spec") or {}).get("data") or {}
    records: dict[str, bytes] = {}
    for bucket, field in FIELDS.items():
        entries = data.get(field)
        if isinstance(entries, dict):
            records.update((f"{bucket}/{inside}", msgspec.json.encode(value)) for inside, value in entries.items())
    return records


def ready_by_slices(slices: Iterable[ApiObject]) -> set[str]:
    """Return the names of the resources to whose pod a service would send traffic."""
    ready: set[str] = set()
    for each in slices:
        for endpoint in each.get("endpoints") or ():
            target = endpoint.get("targetRef") or {}
            # "unknown" counts as ready, as the API's documentation requires of its readers.
            if target.get("kind") == "Pod" and (endpoint.get("conditions") or {}).get("ready") is not False:
                ready.add(target.get("name", ""))
    return ready


def ready_by_containers(pods: Iterable[ApiObject]) -> set[str]:
    """Return the names of the ready resources in the container mode: each container is ready by itself."""
    ready: set[str] = set()
    for pod in pods:
        name = pod["metadata"]["name"]
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            if status.get("ready"):
                ready.add(name if status["name"] == "main" else f"{name}-{status['name']}")
    return ready


def instance_id_of(name: str) -> int:
    """Return the connection id of the worker with a resource of this name: every process computes the same id.

    It is what Rust's default hasher makes of a string, as the native system uses it.
    """
    return _siphash13(name.encode() + b"\xff") & ((1 << _ID_BITS) - 1)


def _siphash13(data: bytes) -> int:
    """Compute SipHash-1-3 with a key of zeros."""
    v = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]

    def mix(rounds: int) -> None:
        for _ in range(rounds):
            v[0] = (v[0] + v[1]) & _MASK
            v[1] = _rotated(v[1], 13) ^ v[0]
            v[0] = _rotated(v[0], 32)
            v[2] = (v[2] + v[3]) & _MASK
            v[3] = _rotated(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & _MASK
            v[3] = _rotated(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & _MASK
            v[1] = _rotated(v[1], 17) ^ v[2]
            v[2] = _rotated(v[2], 32)

    whole = len(data) - len(data) % 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[whole:], "little"))
    for word in words:
        v[3] ^= word
        mix(1)
        v[0] ^= word
    v[2] ^= 0xFF
    mix(3)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK
