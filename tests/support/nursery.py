"""Many real workers for little: one process imports everything, and every worker is a fork of it.

A worker started from nothing takes half a second of a processor, nearly all of it imports; a fork takes a twentieth of that.
Run as a program this is the nursery itself: it reads one JSON object a line ({"env": {...}, "log": "..."}) and writes one for
each birth ({"born": pid}) and each death ({"dead": pid, "status": n}).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from support.processes import PATIENCE_SECONDS, SCRIPTED_ENGINE, Cluster, Worker

PRELOADED = (
    "dynamo.worker.run",
    "dynamo.runtime.calls.request_plane.listener",
    "dynamo.runtime.discovery.etcd",
    "dynamo.runtime.calls.event_plane.zmq",
    "dynamo.chaos.injection",
    "dynamo.chaos.worker",
    "uvloop",
)


class Nursery:
    """`worker()` gives birth to a worker of the scripted engine in a cluster; all of them end with the nursery."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._statuses: dict[int, int] = {}
        self._unread = b""
        self._workers: list[Forked] = []

    def __enter__(self) -> Self:
        tests = str(Path(__file__).parent.parent)
        env = dict(self._cluster.environment) | {"PYTHONPATH": tests}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def worker(self, name: str, model: str, **env: str) -> Worker:
        """Start one; returns when it was born."""
        journal, log = self._cluster.root / f"{name}.journal", self._cluster.root / f"{name}.log"
        own = {"SCRIPTED_MODEL": model, "SCRIPTED_JOURNAL": str(journal), "SCRIPTED_NAME": name}
        request = {"env": dict(self._cluster.environment) | own | env, "log": str(log)}
        assert self._process.stdin is not None
        log.touch()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while (pid := self._read()) is None:
            assert time.monotonic() < ends_at, f"{name} was not born"
            time.sleep(0.002)
        worker = Forked(name, self, pid, log)
        worker.model, worker.journal = model, journal
        self._workers.append(worker)
        return worker

    def status_of(self, pid: int) -> int | None:
        """How a worker ended; None while it lives."""
        self._read()
        return self._statuses.get(pid)

    def _read(self) -> int | None:
        """Take in what the nursery says; the newborn, if there is one."""
        assert self._process.stdout is not None
        born = None
        while data := _available(self._process.stdout.fileno()):
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "born" in told:
                born = told["born"]
            else:
                self._statuses[told["dead"]] = told["status"]
        return born


def _available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


class Forked(Worker):
    """A worker that the nursery gave birth to. It has no status server."""

    def __init__(self, name: str, nursery: Nursery, pid: int, log: Path) -> None:
        self.name, self._log_file = name, log
        self._process: Any = _Handle(nursery, pid)

    def wait_ready(self) -> None:
        self.wait_log(r"Serving \S+ on ")


class _Handle:
    """As much of `Popen` as `Process` needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    def poll(self) -> int | None:
        return self._nursery.status_of(self.pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        ends_at = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < ends_at, f"{self.pid} does not end"
            time.sleep(0.005)
        return status


# -- the nursery itself -----------------------------------------------------------------------------------------------


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    unread = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    be_worker(json.loads(line))
                tell(born=pid)
        bury()


def bury() -> None:
    """Tell of those that have died."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell(dead=pid, status=os.waitstatus_to_exitcode(status))


def tell(**members: int) -> None:
    os.write(1, json.dumps(members).encode() + b"\n")


def be_worker(request: Mapping[str, Any]) -> NoReturn:
    os.environ.clear()
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    random.seed()  # each its own dice
    status = 1
    try:
        sys.argv = [str(SCRIPTED_ENGINE)]
        runpy.run_path(str(SCRIPTED_ENGINE), run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
