"""What a worker with child processes may leave behind: its processes, its files, and errors in its log."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dynamo.runtime.base import process_guard
from dynamo.runtime.base.process_guard import descendants, shared_memory_of
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Worker, wait

LISTENS: Final = "0A"  # the state of a socket in the kernel's tables


class Belongings:
    """The processes of a worker, its private directories, the shared memory it has mapped, and the ports it listens on. Made
    while it lives.
    """

    def __init__(self, worker: Worker, temporary: Path) -> None:
        self.processes = descendants(worker.pid)
        marks = {_mark_of(number) for number in self.processes} - {""}
        shared = (process_guard.SHARED / name for name in shared_memory_of([worker.pid, *self.processes]))
        mine = _sockets_of([worker.pid, *self.processes])
        self.ports = {inode: port for inode, port in _listening().items() if inode in mine}
        self.files = [*shared, *(path for mark in marks for path in temporary.glob(f"dynamo-*-{mark}-*"))]

    def wait_gone(self) -> None:
        wait(lambda: not self._left(), lambda: f"the end of {self._left()}")

    def _left(self) -> list[object]:
        living = (number for number in self.processes if process_guard._stat(number) is not None)
        ports = (f"port {self.ports[inode]}" for inode in self.ports.keys() & _listening().keys())
        return [*living, *(path for path in self.files if path.exists()), *ports]


def _sockets_of(numbers: list[int]) -> set[str]:
    """Return the inodes of the sockets that these processes have open."""
    found = set()
    for number in numbers:
        for descriptor in Path(f"/proc/{number}/fd").glob("*"):
            with suppress(OSError):  # it was closed meanwhile
                kind, _, inode = os.readlink(descriptor).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _listening() -> dict[str, int]:
    """Return the TCP ports that somebody on this machine listens on, by the inode of the socket."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def wait_empty(temporary: Path) -> None:
    """Return when nothing is in a directory but what torch has compiled, which it keeps for the next start."""

    def left() -> list[str]:
        return [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]

    wait(lambda: not left(), lambda: f"the end of {left()}")


def errors_of(log: str) -> str:
    """The errors in a log, each with the lines behind it, where its traceback is."""
    lines = log.splitlines()
    begins = [number for number, line in enumerate(lines) if " ERROR " in line]
    return "\n".join(line for begin in begins for line in lines[begin : begin + 40])


def _mark_of(number: int) -> str:
    before = f"{process_guard.MARK}=".encode()
    entries = process_guard._read(number, "environ").split(b"\0")
    return next((os.fsdecode(entry.removeprefix(before)) for entry in entries if entry.startswith(before)), "")


@contextmanager
def cluster_apart(root: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster with a directory for temporary files of its own. Its path is short: there are sockets in it.

    A worker that was told to end may take as long for its streams as a test waits for these: real engines are slow where others
    use the machine.
    """
    drain = str(int(2 * PATIENCE_SECONDS))
    with (
        tempfile.TemporaryDirectory(prefix="w-") as temporary,
        Cluster(root, TMPDIR=temporary, DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT=drain) as cluster,
    ):
        yield cluster, Path(temporary)
