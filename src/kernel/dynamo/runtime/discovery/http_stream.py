"""Watches as etcd's gateway and Kubernetes stream them: an answer that never ends, one JSON message on each line."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from dynamo.errors import CannotConnect

if TYPE_CHECKING:
    import aiohttp

LINE_LIMIT_BYTES: Final = 64 * 1024 * 1024  # one message; the servers send a few MiB at most

# A peer that vanished without a word is noticed by the kernel: after this idle time it probes, this often.
_TCP_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))


class Lines:
    """Bytes in, whole lines out. A line longer than `limit` raises CannotConnect: the stream makes no sense any more."""

    def __init__(self, limit: int = LINE_LIMIT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._limit:
            raise CannotConnect(f"the store sent a message of more than {self._limit} bytes")
        return [line for line in lines if line.strip()]


def watch_over(response: aiohttp.ClientResponse) -> None:
    """Let the kernel detect that the peer's machine is gone: a watch is silent for hours."""
    connection = response.connection
    raw = None if connection is None or connection.transport is None else connection.transport.get_extra_info("socket")
    if raw is None:
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _TCP_KEEPALIVE:
        if hasattr(socket, name):  # as far as this system has the option
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
