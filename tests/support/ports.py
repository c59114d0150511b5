"""Ports for servers that have to be told theirs: nobody else takes one between its choice and its use."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["free_ports", "held_port"]

LOWEST: Final = 20_000
RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: Final[list[int]] = []  # descriptors of the locks, which end with this process


def free_ports(count: int) -> Sequence[int]:
    """Return ports that nobody listens on, and that are this process's until it ends.

    They are below those that the system gives to sockets without a port of their own, where it leaves room there: one of those
    would be taken by any connection before its server has started. A lock keeps the other processes of the tests away.
    """
    folder = Path(tempfile.gettempdir()) / f"dynamo-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    candidates = list(range(LOWEST, _first_of_the_system()))
    random.SystemRandom().shuffle(candidates)  # not as the tests are seeded: all processes would try the same ones
    found: list[int] = []
    while len(found) < count:
        port = candidates.pop()
        if _is_ours(folder / str(port)) and _is_free(port):
            found.append(port)
    return found


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that refuses connections until the test listens at it, and again when the test has stopped.

    It stays bound all the time: no other process is given it meanwhile.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _first_of_the_system() -> int:
    try:
        first = int(RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError):
        first = 49_152
    return first if first >= LOWEST + 1000 else 65_536


def _is_ours(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held.append(descriptor)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has just been closed is free
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
