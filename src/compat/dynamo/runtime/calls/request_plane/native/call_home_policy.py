"""Where a worker may bring the answer of a native request: to the caller's own machine, unless an operator allows more.

The native wire names the address in the request. Without a check any process that reaches a worker could make it connect to any
host and port that the worker reaches.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Final

from dynamo.errors import InvalidArgument

__all__ = ["SETTING", "CallHomePolicy", "is_own_address"]

SETTING: Final = "DYN_TCP_CALL_HOME_NETWORKS"
ANYWHERE: Final = "any"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_own_address(host: str) -> bool:
    """Return whether an IP address is one of this machine: only such an address can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return not ipaddress.ip_address(host).is_unspecified


class CallHomePolicy:
    """Decides by the address of the caller's request connection and the networks that were allowed."""

    def __init__(self, allowed: Sequence[str] = (), is_own: Callable[[str], bool] = is_own_address) -> None:
        """`allowed`: networks, addresses and host names; "any" ends the check. Raises InvalidArgument naming the setting."""
        self._is_own = is_own
        self._anywhere = ANYWHERE in allowed
        self._networks: list[Network] = []
        self._names: set[str] = set()
        self._permitted: tuple[str, str | None] | None = None  # the last pair: a caller sends many requests
        for entry in allowed:
            if entry == ANYWHERE:
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if "/" in entry or not entry.isascii():
                    raise InvalidArgument(
                        f"{SETTING}: {entry!r} is neither a network (10.0.0.0/8) nor a host name nor {ANYWHERE!r}"
                    ) from None
                self._names.add(entry.lower())

    def permits(self, host: str, caller: str | None) -> bool:
        """Return whether an answer may be sent to `host`. `caller`: the peer of the request connection; None where
        requests come over NATS, which does not carry it: then everything is permitted unless networks were given.
        """
        if self._permitted == (host, caller):
            return True
        permitted = self._is_permitted(host, caller)
        if permitted:
            self._permitted = (host, caller)
        return permitted

    def _is_permitted(self, host: str, caller: str | None) -> bool:
        if self._anywhere or host.lower() in self._names:
            return True
        wanted = _address(host)
        if wanted is None:
            return caller is None and not self._networks and not self._names
        if any(wanted in network for network in self._networks):
            return True
        if caller is None:
            return not self._networks and not self._names
        peer = _address(caller)
        if peer is None or wanted == peer:
            return peer is not None
        # A caller on this machine: it may come from 127.0.0.1 and name the address that others know it by.
        return self._is_own(str(peer)) and self._is_own(str(wanted))


def _address(host: str) -> Address | None:
    """Parse an IP address, an IPv4 one also where it is wrapped into IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
