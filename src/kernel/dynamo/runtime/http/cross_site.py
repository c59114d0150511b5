"""Recognises requests that a page of another site makes through a browser on this machine.

An address of loopback is no protection from them: a browser sends what any page requests, and a page whose name was made to
resolve to 127.0.0.1 may even read the answer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from dynamo.runtime.base.addresses import is_loopback


def cross_site_reason(headers: Iterable[tuple[bytes, bytes]], listens_at: str) -> str | None:
    """Return why a request may come from a page of another site; None: it does not.

    `headers`: names in lower case. `listens_at`: the address that the listener is bound to; one that is open to a network may have
    any name, so there only the Origin decides.
    """
    found = dict(headers)
    host = found.get(b"host", b"").decode("latin-1").strip().lower()
    origin = found.get(b"origin")
    if origin is not None and origin.decode("latin-1").strip().lower().partition("://")[2] != host:
        return "its Origin is another site"
    if is_loopback(listens_at) and not _is_of_this_machine(host):
        return "its Host is a name, and this port is reached by 127.0.0.1, [::1] or localhost only"
    return None


def _is_of_this_machine(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not name or name == "localhost":  # HTTP/1.0 has no Host, and browsers always send one
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
