"""What a worker with child processes may leave behind: its processes, its files, and errors in its log."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo.runtime import process_guard
from dynamo.runtime.process_guard import descendants, shared_memory_of
from support.processes import Cluster, Worker, wait


class Belongings:
    """The processes of a worker, its private directories, and the shared memory it has mapped. Made while it lives."""

    def __init__(self, worker: Worker, temporary: Path) -> None:
        self.processes = descendants(worker.pid)
        marks = {_mark_of(number) for number in self.processes} - {""}
        shared = (process_guard.SHARED / name for name in shared_memory_of([worker.pid, *self.processes]))
        self.files = [*shared, *(path for mark in marks for path in temporary.glob(f"dynamo-*-{mark}-*"))]

    def wait_gone(self) -> None:
        wait(lambda: not self._left(), lambda: f"the end of {self._left()}")

    def _left(self) -> list[object]:
        living = (number for number in self.processes if process_guard._stat(number) is not None)
        return [*living, *(path for path in self.files if path.exists())]


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
    """A cluster with a directory for temporary files of its own. Its path is short: there are sockets in it."""
    with tempfile.TemporaryDirectory(prefix="w-") as temporary, Cluster(root, TMPDIR=temporary) as cluster:
        yield cluster, Path(temporary)
