"""Where the gateway reaches a worker: the host of its request plane, and the port of the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dynamo.runtime.calls.request_plane.base import Instance, split_tcp

DEFAULT_TARGET_PORT: Final = 8000


class Addresses:
    """The HTTP address of a worker's pod, by its record in discovery."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port

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
