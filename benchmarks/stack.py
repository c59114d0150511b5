"""Start what is measured, afresh, and ask the kernel what it used."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_SECONDS = 120.0  # on a machine that others use as well
POLL_SECONDS = 0.01
LISTENING_PORTS = (20_000, 32_000)


@dataclass(frozen=True)
class Stack:
    """Processes that serve on one port: pids by name."""

    port: int
    pids: Mapping[str, int]
    seconds_to_first_answer: float

    def cpu(self) -> dict[str, float]:
        """User + system seconds of each process so far."""
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}

    def waited(self) -> dict[str, float]:
        """Seconds that the threads of each process could have run so far, and no CPU was free."""
        return {name: waited_seconds(pid) for name, pid in self.pids.items()}

    def rss(self) -> dict[str, float]:
        """Resident memory of each process, in MB."""
        return {name: rss_mb(pid) for name, pid in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """User + system seconds of one process so far, all its threads, to the nanosecond.

    That is the process's own CPU clock (`clock_getcpuclockid(3)`); /proc/PID/stat counts in ticks of 10 ms, which is more
    than some of the figures here.
    """
    return time.clock_gettime((~pid << 3) | 2)


def waited_seconds(pid: int) -> float:
    """Seconds that the threads of one process were ready to run and had no CPU; of those threads that still live."""
    waited = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    """Return a port that was free a moment ago, below those that the system gives to outgoing connections.

    One of theirs may be taken again before the program that shall listen has started, which on a busy machine takes seconds.
    """
    while True:
        port = random.randrange(*LISTENING_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def post(port: int, body: dict[str, Any], timeout: float = 10) -> dict[str, Any]:
    """One unary chat request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def end_on_sigterm() -> None:
    """Have SIGTERM leave this process as an exception does, so that the processes that it has started end, too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def processes(
    commands: Mapping[str, Sequence[str]],
    port: int,
    env: Mapping[str, str],
    folder: Path,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    is_up: Callable[[], bool] | None = None,
    is_killed: bool = False,
) -> Iterator[Stack]:
    """Start `commands`, wait for the first answer on `port` (or for `is_up`), stop all at the end.

    `is_killed`: without a signal before, for programs that drain for seconds. SIGTERM of this process ends them, too.
    """
    end_on_sigterm()
    with (folder / "log").open("wb") as log:
        begun = time.perf_counter()
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, line in commands.items():  # one that is not found leaves none of the others behind
                running[name] = subprocess.Popen(line, env=dict(env), stdout=log, stderr=log)
            body = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            while True:
                try:
                    if is_up is None:
                        post(port, body)
                    if is_up is None or is_up():
                        break
                    raise OSError("not yet")
                except (OSError, ValueError, urllib.error.URLError):
                    is_late = time.perf_counter() - begun > patience_seconds
                    if is_late or any(process.poll() is not None for process in running.values()):
                        tail = (folder / "log").read_text()[-3000:]
                        raise RuntimeError(f"the stack did not come up:\n{tail}") from None
                    time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - begun
            yield Stack(port, {name: process.pid for name, process in running.items()}, seconds)
        finally:
            for process in running.values():
                process.kill() if is_killed else process.terminate()
            for process in running.values():
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def cluster_services(folder: Path) -> Iterator[None]:
    """A real etcd and a real NATS server (from the development wheels) that every stack started meanwhile joins."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.etcd_server import EtcdServer
    from support.nats_server import nats_server

    with EtcdServer(folder / "etcd") as etcd, nats_server() as nats:
        os.environ |= {"ETCD_ENDPOINTS": etcd.url, "NATS_SERVER": nats.url}
        try:
            yield
        finally:
            del os.environ["ETCD_ENDPOINTS"], os.environ["NATS_SERVER"]


@contextlib.contextmanager
def stack(
    model: Path,
    delay: float,
    *,
    step: float = 0.0,
    has_tls: bool = False,
    is_eager: bool = False,
    frontend: Sequence[str] = (),
) -> Iterator[Stack]:
    """Our frontend and one bench worker. INFO logs, metrics and migration are on: what one deploys.

    `has_tls`: between the two of them, with certificates on both sides. `frontend`: more of its flags.
    """
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        discovery = "etcd" if "ETCD_ENDPOINTS" in os.environ else "file"  # see `cluster_services`
        env = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | {
            "DYN_FILE_KV": str(Path(name) / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": "info",
            **({"DYN_EVENT_PLANE": "nats"} if "NATS_SERVER" in os.environ else {}),
            **(mutual_tls(Path(name)) if has_tls else {}),
        }
        commands = {
            "frontend": [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", discovery, "--http-host", "127.0.0.1", "--http-port", str(port), *frontend],
            "worker": [sys.executable, str(HERE / "engine.py"), "--model", str(model), "--delay", str(delay), "--step", str(step), "--discovery-backend", discovery, *(["--eager"] if is_eager else [])],
        }  # fmt: skip
        with processes(commands, port, env, Path(name)) as running:
            yield running


def mutual_tls(folder: Path) -> dict[str, str]:
    """Variables of a request plane with one certificate for everybody, made in `folder`."""
    import trustme  # with the development extra

    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    ca, cert, key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    return {
        "DYN_TCP_TLS_CERT_PATH": cert,
        "DYN_TCP_TLS_KEY_PATH": key,
        "DYN_TCP_TLS_CA_CERT_PATH": ca,
        "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": ca,
        "DYN_TCP_TLS_CLIENT_CERT_PATH": cert,
        "DYN_TCP_TLS_CLIENT_KEY_PATH": key,
    }


@contextlib.contextmanager
def floor(what: str, delay: float) -> Iterator[Stack]:
    """A bare server of `floor.py`: "uvicorn" or "write"."""
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        command = [sys.executable, str(HERE / "floor.py"), "--what", what, "--port", str(port), "--delay", str(delay)]
        with processes({"floor": command}, port, os.environ, Path(name)) as running:
            yield running
