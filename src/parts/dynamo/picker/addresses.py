"""Where the gateway reaches a worker: the host of its request plane, and the port of the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dynamo.picker.prefill import PrefillWorker
from dynamo.router.workers.pool import ChosenWorker
from dynamo.runtime.calls.request_plane.base import Instance, split_tcp

DEFAULT_TARGET_PORT: Final = 8000
PREFILLER: Final = "x-prefiller-host-port"


class Addresses:
    """The HTTP address of a worker's pod, by its record in discovery."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.changes = 0
        """Another number after each change of what this returns for a worker whose record stays the same."""

    def of(self, instance: Instance | None) -> str | None:
        """Return `ip:port`; None: the record names no TCP address, so that no gateway can reach its worker."""
        tcp = None if instance is None else instance.transport.get("tcp")
        if tcp is None:
            return None
        try:
            host, _, _ = split_tcp(tcp)
        except ValueError:
            return None
        return f"[{host}]:{self._target_port}" if ":" in host else f"{host}:{self._target_port}"

    def headers_for(self, worker: ChosenWorker) -> list[tuple[str, str]]:
        """Return the headers by which a frontend beside the worker sends a request there."""
        headers = [("x-dynamo-worker-instance-id", str(worker.instance.instance_id))]
        if (rank := worker.placement.dp_rank) is not None:
            headers.append(("x-dynamo-dp-rank", str(rank)))
        return headers

    def headers_of_prefill(self, worker: PrefillWorker) -> list[tuple[str, str]]:
        """Return the headers by which what stands beside the decode worker has the prompt computed."""
        headers = [("x-dynamo-prefill-instance-id", str(worker.instance.instance_id))]
        if (rank := worker.placement.dp_rank) is not None:
            headers.append(("x-dynamo-prefill-dp-rank", str(rank)))
        return [*headers, *self.prefill_address(worker)]

    def prefill_address(self, worker: PrefillWorker) -> list[tuple[str, str]]:
        """Return the header with the address of the prefill worker, as llm-d's sidecar reads it."""
        address = self.of(worker.instance)
        return [] if address is None else [(PREFILLER, address)]

    def is_full(self, instance_id: int) -> bool:
        """Return whether a worker has so much to do that it gets no further request."""
        return False

    @property
    def trouble(self) -> str | None:
        """Why the list of workers may be out of date; None: it is not, or discovery knows."""
        return None


def read_hint(given: object) -> frozenset[str] | None:
    """Return the addresses that a gateway leaves to choose from; None: it names none, so that all are.

    A list as the protocol has it, or one text with commas, which is what Envoy's own filter writes.
    """
    if given is None:
        return None
    items: Iterable[object] = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else ()
    return frozenset(item.strip() for item in items if isinstance(item, str) and item.strip())


def member_of(metadata: Mapping[str, Mapping[str, object]], namespace: str, key: str) -> object:
    """Return one member of the metadata that a gateway sent; None: it is absent."""
    found = metadata.get(namespace)
    return None if found is None else found.get(key)
