"""Under which address this machine is reached."""

from __future__ import annotations

import socket
from typing import Final

__all__ = ["WILDCARDS", "detect_host"]

WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})  # to bind, but not to advertise


def detect_host() -> str:
    """The address other machines most likely reach this one at; 127.0.0.1 where there is no network."""
    # A datagram socket that is connected sends nothing, but is told which local address its route would use. The
    # targets are the documentation networks, which no packet may ever be sent to.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue  # no such family, or no route
        if not host.startswith("127.") and host not in ("::1", "0.0.0.0", "::"):
            return host
    return "127.0.0.1"
