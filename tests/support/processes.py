"""Real processes for end-to-end tests: frontends and workers on one file store, their logs, readiness, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from support.patience import PATIENCE_SECONDS

SUPPORT = Path(__file__).parent
SCRIPTED_ENGINE = SUPPORT / "scripted_engine.py"
NODE_SERVER = SUPPORT.parent.parent / "examples" / "node-backend" / "server.js"

RUST_ENGINE = os.environ.get("RUST_SCRIPTED_ENGINE", "")
"""The scripted engine in Rust (`make test-rust` builds it). With it the workers of the end-to-end tests are that program:
all of them, or with RUST_WORKERS=first or RUST_WORKERS=second those whose name ends in "a" or in "b"."""

RUST_NAMES = {"first": "a", "second": "b"}.get(os.environ.get("RUST_WORKERS", ""), "")

RUST_SAMPLE = os.environ.get("RUST_SAMPLE_ENGINE", "") if RUST_ENGINE else ""

POLL_SECONDS = 0.01
LAST_WORDS_SECONDS = 5.0
LAST_WORDS_CHARS = 2500


class Process:
    """One process with its output in a file. Killed at `close` if it still runs."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name, self._log_file = name, log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                argv, env=dict(env) | {"PYTHONFAULTHANDLER": "1"}, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def last_words(self) -> str:
        """Its log, and the stack of each of its threads if it still runs: ends it. For a test that has failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGABRT)  # the fault handler of Python writes the stacks
            self._process.wait(LAST_WORDS_SECONDS)
        return self.log

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_log(self, pattern: str) -> re.Match[str]:
        """The first match of `pattern` in the log, once it is there."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.search(pattern, self.log)
            if match is not None:
                found.append(match)
            elif self.has_ended:
                raise AssertionError(f"{self.name} ended without {pattern!r}; its log:\n{self.log}")
            return match is not None

        wait(look, lambda: f"{self.name} to log {pattern!r}; its log:\n{self.last_words()}")
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def exit_code(self) -> int:
        """Wait for the end."""
        return self._process.wait(PATIENCE_SECONDS)

    async def ended(self) -> int:
        """As `exit_code`, for a test whose own requests go on meanwhile."""
        await until(lambda: self.has_ended, lambda: f"{self.name} to end; its log:\n{self.last_words()}")
        return self.exit_code()

    def resident_bytes(self) -> int:
        """Memory in use now (Linux)."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        if not self.has_ended:
            self.kill()
            self.exit_code()


class Frontend(Process):
    """`python -m dynamo.frontend` on a port of the system's choice."""

    port = 0

    def wait_ready(self) -> None:
        self.port = int(self.wait_log(r"serving HTTP on \S+:(\d+)")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        """A plain GET."""
        return get(self.port, path)

    def models(self) -> set[str]:
        return {model["id"] for model in json.loads(self.get("/v1/models")[1])["data"]}

    def workers(self, model: str) -> int:
        """How many workers with an instance this frontend knows for a model."""
        status, body = self.get(f"/v1/models/{model}/ready")
        if status != 200:
            return 0
        cards = sum(
            role["workers"]
            for namespace in json.loads(body)["namespaces"].values()
            for role in namespace["worker_types"].values()
        )
        return min(cards, self._instances_beside(model))

    def roles(self, model: str) -> set[str]:
        """The roles of the workers of a model that this frontend knows, with an instance for each."""
        status, body = self.get(f"/v1/models/{model}/ready")
        namespaces = json.loads(body)["namespaces"].values() if status == 200 else ()
        return {role for one in namespaces for role, found in one["worker_types"].items() if found["instance_ids"]}

    def _instances_beside(self, model: str) -> int:
        # Each model of these tests lives on a component of its own name.
        instances = json.loads(self.get("/health")[1])["instances"]
        return sum(one["component"] == model for one in instances)


class Worker(Process):
    """One worker process; the scripted engine's journal is `journal`."""

    model = ""
    journal = Path()
    system_port = 0

    def wait_ready(self) -> None:
        self.system_port = int(self.wait_log(r"status server on \S+:(\d+)")[1])
        self.wait_log(r"Serving \S+ on ")

    def events(self, tag: str | None = None) -> list[dict[str, Any]]:
        """What the engine wrote down, in order; of one tag, if given."""
        lines = self.journal.read_bytes().split(b"\n") if self.journal.exists() else []
        events = [json.loads(line) for line in lines[:-1]]  # the last piece is empty, or half written
        return [event for event in events if tag is None or event["tag"] == tag]

    def count(self, event: str, tag: str) -> int:
        return sum(one["event"] == event for one in self.events(tag))

    async def sees(self, event: str, tag: str, times: int = 1) -> list[dict[str, Any]]:
        """Wait until `event` was written `times` times; those events."""
        await until(lambda: self.count(event, tag) >= times, lambda: f"{times} x {event}; journal: {self.events(tag)}")
        return [one for one in self.events(tag) if one["event"] == event]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 when there is none."""
        _, body = get(self.system_port, "/metrics")
        samples = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", body.decode(), re.MULTILINE)
        return sum(map(float, samples))

    async def idle(self) -> None:
        """Wait until no request is being handled."""
        name = "dynamo_component_inflight_requests"
        await until(lambda: self.metric(name) == 0, lambda: f"{self.name} to be idle; log:\n{self.log}")


P = TypeVar("P", bound=Process)


class Cluster:
    """Processes on one file store, or on another. Starting returns at once; `wait_ready` of each waits."""

    def __init__(self, root: Path, discovery_backend: str = "file", **env: str) -> None:
        """`env`: variables of every process."""
        self.root = root
        self._discovery = ("--discovery-backend", discovery_backend)
        self._processes: list[Process] = []
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "OTEL_", "ETCD_"))},
            "DYN_FILE_KV": str(root / "store"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "DYN_LOG": "info",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "HOME": str(root),
            **env,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of every process."""
        return self._environment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.close()
        for process in self._processes:  # pytest shows it where the test has failed
            print(f"the end of what {process.name} logged:", process.log[-LAST_WORDS_CHARS:], sep="\n")

    def frontend(
        self, name: str, *flags: str, within: Sequence[str] = (), python: str = sys.executable, **env: str
    ) -> Frontend:
        """Start a frontend; `env` adds variables. `within`: a program and its arguments that runs it."""
        argv = [python, *within, "-m", "dynamo.frontend", *self._discovery]
        return self._start(Frontend, name, [*argv, "--http-host", "127.0.0.1", "--http-port", "0", *flags], env)

    def worker(self, name: str, model: str, *, python: str = sys.executable, **env: str) -> Worker:
        """Start a worker of the scripted engine."""
        journal = self.root / f"{name}.journal"
        own = {"SCRIPTED_MODEL": model, "SCRIPTED_JOURNAL": str(journal), "SCRIPTED_NAME": name}
        is_rust = RUST_ENGINE and name.endswith(RUST_NAMES)
        argv = [RUST_ENGINE] if is_rust else [python, str(SCRIPTED_ENGINE)]
        return self._worker(name, model, argv, own | env, journal)

    def sample(self, name: str, model: str, *flags: str, **env: str) -> Worker:
        """Start a worker of the sample engine."""
        argv = [RUST_SAMPLE, *self._discovery]
        if not RUST_SAMPLE:
            argv = [sys.executable, "-m", "dynamo.engines.sample.main", *self._discovery]
        own = ["--model-name", model, "--component", model]
        return self._worker(name, model, [*argv, *own, *flags], env, self.root / f"{name}.journal")

    def raw(self, name: str, model: str, program: str, *flags: str, **env: str) -> Worker:
        """Start a worker of a raw engine, a module that is run."""
        own = ["--model-name", model, "--component", model]
        argv = [sys.executable, "-m", program, *self._discovery, *own, *flags]
        return self._worker(name, model, argv, env, self.root / f"{name}.journal")

    def reference(self, name: str, model: str, directory: Path, *flags: str, program: str = "", **env: str) -> Worker:
        """Start a worker of the reference engine; `program`: Python to run before it."""
        start = f"{program}\nfrom dynamo.reference.__main__ import main\nmain()"
        argv = [sys.executable, "-c", start, "--model", str(directory), "--discovery-backend", "file"]
        own = ["--served-model-name", model, "--component", model]
        return self._worker(name, model, [*argv, *own, *flags], env, self.root / f"{name}.journal")

    def mocker(self, name: str, model: str, *flags: str, **env: str) -> Worker:
        """Start a process of the mocker."""
        argv = [sys.executable, "-m", "dynamo.mocker", *self._discovery, "--model-path", model, *flags]
        return self._worker(name, model, argv, env, self.root / f"{name}.journal")

    def node(self, name: str, node: str, model: str, *flags: str) -> Process:
        """Start the Node.js example."""
        return self._start(Process, name, [node, str(NODE_SERVER), "--model-name", model, *flags], {})

    def process(self, name: str, argv: Sequence[str], **env: str) -> Process:
        """Start anything else."""
        return self._start(Process, name, argv, env)

    def wait_ready(self, frontend: Frontend, *workers: Worker) -> None:
        """Return when `frontend` serves the models of these workers, and no others of theirs."""
        processes: tuple[Frontend | Worker, ...] = (frontend, *workers)
        for process in processes:
            process.wait_ready()
        expected = Counter(worker.model for worker in workers)

        def look() -> bool:
            for process in processes:
                assert not process.has_ended, f"{process.name} ended; its log:\n{process.log}"
            return all(frontend.workers(model) == count for model, count in expected.items())

        wait(look, lambda: f"{expected} to be served; log:\n{frontend.log}")

    def _worker(self, name: str, model: str, argv: Sequence[str], env: Mapping[str, str], journal: Path) -> Worker:
        worker = self._start(Worker, name, argv, {"DYN_SYSTEM_PORT": "0", "DYN_SYSTEM_HOST": "127.0.0.1"} | dict(env))
        worker.model, worker.journal = model, journal
        return worker

    def _start(self, kind: type[P], name: str, argv: Sequence[str], env: Mapping[str, str]) -> P:
        process = kind(name, argv, self._environment | dict(env), self.root / f"{name}.log")
        self._processes.append(process)
        return process


@dataclass
class Stack:
    """`scripted` serves everything; `narrow` one request at a time, and one more may wait."""

    cluster: Cluster
    frontend: Frontend
    scripted: Worker
    narrow: Worker

    @property
    def port(self) -> int:
        return self.frontend.port


def get(port: int, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """A plain request at this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Poll until `condition` holds; fails saying what was waited for."""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"waited in vain for {what()}")
        time.sleep(POLL_SECONDS)


async def until(
    condition: Callable[[], bool],
    what: Callable[[], str] = lambda: "a condition",
    *,
    patience: float = PATIENCE_SECONDS,
) -> None:
    """As `wait`, without holding the event loop."""
    ends_at = time.monotonic() + patience
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"waited in vain for {what()}")
        await asyncio.sleep(POLL_SECONDS)
