"""Which pods there are: the records of a flag, of a file, and of Kubernetes. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from dynamo.contract.modes import DisaggregationMode
from dynamo.runtime.discovery.kubernetes.records import instance_id_of

MAX_PODS: Final = 4096
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
ROLES: Final = {
    "": DisaggregationMode.AGGREGATED,
    "both": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}


class PodDefaults(NamedTuple):
    """The ports of pods that name none of their own; None: they do not have it."""

    event_port: int | None
    replay_port: int | None


class PodRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pod. `events` and `replay` are ports of its host, or addresses such as tcp://10.0.0.2:5557."""

    address: str
    role: str = ""
    events: int | str | None = None
    replay: int | str | None = None

    def __str__(self) -> str:
        return f"{self.role}@{self.address}" if self.role else self.address

    def __post_init__(self) -> None:
        split_address(self.address)
        if self.role not in ROLES:
            raise ValueError(f"the role of {self.address} must be prefill, decode or both, got {self.role!r}")
        for name in ("events", "replay"):
            given = getattr(self, name)
            if isinstance(given, int) and not 0 <= given <= 65535:
                raise ValueError(f"{name} of {self.address} must be a port or an address, got {given}")

    @property
    def mode(self) -> DisaggregationMode:
        """What the pod does."""
        return ROLES[self.role]

    @property
    def instance_id(self) -> int:
        """Its id as a worker: the same in every picker."""
        return instance_id_of(self.address)

    def event_address(self, defaults: PodDefaults) -> str | None:
        """Return where it publishes KV events; None: it does not."""
        return self._socket(self.events, defaults.event_port)

    def replay_address(self, defaults: PodDefaults) -> str | None:
        """Return where it sends KV events again; None: it does not."""
        return self._socket(self.replay, defaults.replay_port)

    def _socket(self, own: int | str | None, default: int | None) -> str | None:
        found = default if own is None else own
        if isinstance(found, str):
            return found or None
        return f"tcp://{split_address(self.address)[0]}:{found}" if found else None


class _PodFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pods: list[PodRecord]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; the host of IPv6 stays in its brackets. Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) <= 65535:
        raise ValueError(f"a pod is named as HOST:PORT, got {address!r}")
    return found[1], int(found[2])


def read_pods(given: str) -> tuple[PodRecord, ...]:
    """Read `[ROLE@]HOST:PORT,...`. Raises ValueError."""
    found = []
    for item in filter(None, (each.strip() for each in given.split(","))):
        role, at, address = item.rpartition("@")
        if at and not role:
            raise ValueError(f"a pod is named as ROLE@HOST:PORT or HOST:PORT, got {item!r}")
        found.append(PodRecord(address, role))
    return checked_pods(found)


def read_pod_file(content: bytes) -> tuple[PodRecord, ...]:
    """Read the content of a file of pods: `pods`, a list of records. Raises ValueError."""
    try:
        return checked_pods(msgspec.yaml.decode(content, type=_PodFile).pods)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def checked_pods(found: list[PodRecord]) -> tuple[PodRecord, ...]:
    """Return the records. Raises ValueError for an address that stands twice, and for too many."""
    if len(found) > MAX_PODS:
        raise ValueError(f"at most {MAX_PODS} pods, got {len(found)}")
    seen = set[str]()
    for each in found:
        if each.address in seen:
            raise ValueError(f"the pod {each.address} stands twice")
        seen.add(each.address)
    return tuple(found)


def pod_of_kubernetes(found: Mapping[str, Any], port: int, role_label: str) -> PodRecord | None:
    """Return the record of a pod of Kubernetes; None: it has no address yet, is not ready, or is on its way out."""
    metadata, status = found.get("metadata") or {}, found.get("status") or {}
    ip = status.get("podIP")
    is_ready = any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or ()
    )
    if not isinstance(ip, str) or not is_ready or metadata.get("deletionTimestamp") is not None:
        return None
    role = (metadata.get("labels") or {}).get(role_label) or ""
    host = f"[{ip}]" if ":" in ip else ip
    return PodRecord(f"{host}:{port}", role if role in ("prefill", "decode") else "")
