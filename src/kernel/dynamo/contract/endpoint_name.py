"""The name of an endpoint in one text."""

from __future__ import annotations

from typing import Final

ENDPOINT_SCHEME: Final = "dyn://"


def parse_endpoint(endpoint: str) -> tuple[str, str, str]:
    """Split `dyn://NAMESPACE.COMPONENT.ENDPOINT`, with or without the scheme. Raises ValueError for another form."""
    parts = endpoint.removeprefix(ENDPOINT_SCHEME).split(".")
    if len(parts) != 3:
        raise ValueError(
            f"{endpoint!r} is not an endpoint; write {ENDPOINT_SCHEME}NAMESPACE.COMPONENT.ENDPOINT, or the same without "
            f"{ENDPOINT_SCHEME}"
        )
    namespace, component, name = parts
    return namespace, component, name
