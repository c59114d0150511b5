"""Finds out, as a person would with curl, whether the frontend answers, lists a model, and routes to a worker."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from dynamo.cli.console import Console
from dynamo.cli.local_processes import LocalProcesses
from dynamo.cli.usage import PlainRefusal, UsageError
from dynamo.errors import CannotConnect
from dynamo.runtime.base.addresses import UnixListener, bound_socket
from dynamo.supervise.newcomer import POLL_SECONDS, WorkerRefused
from dynamo.supervise.process import SupervisedProcess
from dynamo.supervise.scaling import LoadReading

PROBE_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 3.0
MAX_ANSWER_BYTES: Final = 1 << 20
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    """The frontend as a client on this machine reaches it."""

    host: str
    port: int | None  # None: there is only the Unix socket
    is_tls: bool = False
    models_path: str = "/v1/models"
    key: str | None = field(default=None, repr=False)  # the API key, where the frontend needs one
    uds: str = ""  # the path of its Unix socket; "": it has none
    root_path: str = ""

    @classmethod
    def of(cls, host: str, port: int | None, env: Mapping[str, str], key: str | None = None) -> Self:
        """Return the address of a frontend that listens on `host`. Raises UsageError for one that this command cannot reach."""
        if env.get("DYN_TLS_CLIENT_CA_CERT_PATH"):
            raise UsageError(
                "a frontend that asks for client certificates (DYN_TLS_CLIENT_CA_CERT_PATH) cannot be watched from "
                "here; start python -m dynamo.frontend and the backend by themselves"
            )
        path = env.get("DYN_HTTP_SVC_MODELS_PATH", "").strip() or "/v1/models"
        return cls(WILDCARDS.get(host, host), port, bool(env.get("DYN_TLS_CERT_PATH")), path, key)

    @property
    def url(self) -> str:
        if self.port is None:
            return f"http://localhost{self.root_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.root_path}"

    @property
    def shown(self) -> str:
        """Return where it is, for people."""
        return f"unix:{self.uds}" if self.port is None else self.url


def bind(host: str, port: int | None, uds: str | None = None) -> list[socket.socket]:
    """Return the frontend's sockets, bound and not listening yet: that of the port, and the Unix socket.

    This process keeps them, so that they are ours while the frontend is started again. Raises UsageError.
    """
    found = [] if port is None else [_bound(host, port)]
    try:
        return found if uds is None else [*found, UnixListener(uds)]
    except CannotConnect as error:
        for listener in found:
            listener.close()
        raise UsageError(str(error)) from None


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            # It has the words; the import is slow and only needed here.
            from dynamo.frontend.http.server import PortInUse

            raise PlainRefusal(str(PortInUse(port))) from None
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


async def listed_models(address: Address) -> list[str] | None:
    """Return the models that the frontend lists, or None when it does not answer."""
    with suppress(OSError, TimeoutError, ValueError, KeyError, TypeError):
        async with asyncio.timeout(PROBE_SECONDS):
            return [str(model["id"]) for model in json.loads(await _get(address, address.models_path))["data"]]
    return None


async def takes_requests(address: Address, model: str, instance_id: int) -> bool:
    """Return whether the frontend sends requests for `model` to this worker. Raises WorkerRefused where it never will."""
    with suppress(OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
        async with asyncio.timeout(PROBE_SECONDS):
            path = f"{address.models_path.rstrip('/')}/{quote(model)}/ready"
            body: dict[str, Any] = json.loads(await _get(address, path))
        for namespace in body["namespaces"].values():
            for refused in namespace.get("rejected_workers", ()):
                if refused["instance_id"] == instance_id:
                    raise WorkerRefused(f"{model}: {refused['reason']} from that of the workers there are")
            if any(instance_id in role["instance_ids"] for role in namespace["worker_types"].values()):
                return True
    return False


async def read_load(address: Address, model: str) -> LoadReading | None:
    """Return what the frontend reports of the load of a model's workers; None while it does not answer."""
    with suppress(OSError, TimeoutError, ValueError, KeyError, TypeError):
        async with asyncio.timeout(PROBE_SECONDS):
            try:
                said = json.loads(await _get(address, f"/autoscale/v1/{quote(model)}"))
            except UnknownThere:
                return LoadReading(0.0, is_known=False)
        running = {int(worker["id"], 16): int(worker["running"]) for worker in said["workers"]}
        return LoadReading(float(said["value"]) * max(1, int(said["ready"])), running)
    return None


class UnknownThere(ValueError):
    """The frontend answered with a 404."""


async def _get(address: Address, path: str) -> bytes:
    """Return the body of a 200; raises what goes wrong."""
    tls = None
    if address.is_tls:
        tls = ssl.create_default_context()
        tls.check_hostname = False  # our own child on a socket of ours: no other process could answer
        tls.verify_mode = ssl.CERT_NONE
    if address.port is None:
        reader, writer = await asyncio.open_unix_connection(address.uds, limit=MAX_ANSWER_BYTES)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=MAX_ANSWER_BYTES)
    try:
        authorization = "" if address.key is None else f"Authorization: Bearer {address.key}\r\n"
        host = "localhost" if address.port is None else address.host
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}Connection: close\r\n\r\n"
        writer.write(head.encode())
        answer_head = await reader.readuntil(b"\r\n\r\n")
        status = answer_head.split(b" ", 2)[1]
        if status != b"200":
            raise UnknownThere if status == b"404" else ValueError("not a 200")
        return await reader.read(MAX_ANSWER_BYTES) if b"chunked" not in answer_head else b""
    finally:
        writer.close()


async def wait_listed(
    address: Address, console: Console, *, waits_for: Callable[[], str], on_answer: Callable[[], None]
) -> list[str]:
    """Return the models as soon as there is one; every few seconds a line names what is missing.

    `on_answer` is called at the frontend's first answer, with models or without.
    """
    loop = asyncio.get_running_loop()
    begun = reported_at = loop.time()
    has_answered = False
    while True:
        models = await listed_models(address)
        if models is not None and not has_answered:
            has_answered = True
            on_answer()
        if models:
            return models
        if loop.time() - reported_at >= PROGRESS_SECONDS:
            reported_at = loop.time()
            missing = waits_for() if has_answered else f"{waits_for()}; the frontend does not answer yet"
            console.say(f"waiting for {missing} ({reported_at - begun:.0f} s)")
        await asyncio.sleep(POLL_SECONDS)


def say_inspector(console: Console, port: int | None) -> None:
    """Print the address of the inspector at a port once, with its token; nothing where it has none.

    The token stands behind `#`, so that no browser sends it in an address and no log gets it.
    """
    # Here: code that only waits for a frontend does not need it.
    from dynamo.runtime.http.inspector_token import find_access

    access = None if port is None else find_access(port)
    if access is not None:
        console.say(f"inspector: {access.url}/inspect/#k={access.token}")


def ready_text(address: Address, model: str, surfaces: str) -> str:
    """Return a request that works, and how to stop."""
    offered = {surface.strip() for surface in surfaces.split(",")}
    if "chat" in offered:
        path = os.environ.get("DYN_HTTP_SVC_CHAT_PATH") or "/v1/chat/completions"
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    elif "completions" in offered:
        path = os.environ.get("DYN_HTTP_SVC_CMP_PATH") or "/v1/completions"
        body = {"model": model, "prompt": "Hello"}
    else:
        path, body = address.models_path, {}
    options = "-k " if address.is_tls else f"--unix-socket {shlex.quote(address.uds)} " if address.port is None else ""
    request = f"curl {options}{address.url}{path}"
    if address.key is not None:
        request += " -H 'Authorization: Bearer KEY'"  # one of the user's: this command's is for itself
    if body:
        request += f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"  {request}\n  Ctrl-C stops it (twice: at once)"


# What `dynamo serve` prints while it comes up: the table of processes, the workers that serve, and Ready.


class Announcement:
    """Knows from the workers' reports what each of them serves, and from the frontend whether it routes to them."""

    def __init__(
        self, console: Console, processes: LocalProcesses, address: Address, store: Path, inspector_port: int | None
    ) -> None:
        """`inspector_port`: the port of the admin routes, or that of the API where only the log names one; None: neither."""
        self._console = console
        self._processes = processes
        self._address = address
        self._store = store
        self._inspector_port = inspector_port
        self._endpoints: dict[str, str] = {}
        self._served: dict[str, tuple[str, int]] = {}  # worker -> (model, instance id) that it reported last
        self._surfaces: str | None = None  # None: no worker was configured yet
        self._is_announced = False

    @property
    def model(self) -> str | None:
        """What the workers serve; None: none has served yet."""
        return next((model for model, _ in self._served.values()), None)

    def on_configured(self, worker: SupervisedProcess, report: Mapping[str, Any]) -> None:
        """Take the report of a worker that has read its command line."""
        self._endpoints[worker.name] = report["endpoint"]
        if worker is self._processes.upstream:
            return
        is_first = self._surfaces is None  # the command line of all workers is the same one
        self._surfaces = report["surfaces"]
        if is_first:
            self._show_table(report["endpoint"])

    def on_serving(self, worker: SupervisedProcess, report: Mapping[str, Any]) -> None:
        """Take the report of a worker that serves."""
        if worker is not self._processes.upstream:
            self._served[worker.name] = report["model"], report["instance_id"]
        again = " again" if worker.starts > 1 else ""
        pid = worker.process.pid if worker.process is not None else 0
        self._console.say(
            f"{worker.name} (pid {pid}) serves {self._endpoints[worker.name]}{again} at {report['address']}"
        )

    def _show_table(self, endpoint: str) -> None:
        """Print the processes."""
        frontend = self._processes.frontend
        rows = [
            (
                process.name,
                str(process.process.pid) if process.process else "-",
                self._address.shown if process is frontend else endpoint,
            )
            for process in self._processes.all()
        ]
        self._console.table(("process", "pid", "address"), rows)
        self._console.say(f"they find each other in {self._store}")
        self._console.release()

    async def follow_frontend(self) -> None:
        """Wait, after every start of the frontend, until it answers and lists a model, and print that."""
        started = self._processes.frontend_started
        while True:
            await started.wait()
            started.clear()
            try:
                await self._announce()
            except Exception:
                started.set()  # so that what runs this again prints what is owed
                raise

    async def _announce(self) -> None:
        missing, on_answer = self._processes.missing, self._processes.frontend.mark_ready
        models = await wait_listed(self._address, self._console, waits_for=missing, on_answer=on_answer)
        if not self._is_announced:
            if not self._processes.workers:  # models are loaded at their first request
                self._show_table("-")
            await self._all_taken()
            self._is_announced = True
            self._console.say("Ready", strong=True)
            self._console.say(ready_text(self._address, self.model or models[0], self._surfaces or ""))
            say_inspector(self._console, self._inspector_port)
        else:
            self._console.say(f"frontend serves again at {self._address.shown}")

    async def _all_taken(self) -> None:
        """Wait until the frontend sends requests to every requested worker."""
        loop = asyncio.get_running_loop()
        begun = reported_at = loop.time()
        for worker in self._processes.workers:
            while not await self._is_taken(worker):
                if loop.time() - reported_at >= PROGRESS_SECONDS:
                    reported_at = loop.time()
                    self._console.say(f"waiting for {worker.name} ({reported_at - begun:.0f} s)")
                await asyncio.sleep(POLL_SECONDS)

    async def _is_taken(self, worker: SupervisedProcess) -> bool:
        if worker.name not in self._served:
            return False
        try:
            return await takes_requests(self._address, *self._served[worker.name])
        except WorkerRefused as refusal:
            self._console.complain(f"the frontend refuses {worker.name} ({refusal}); the other workers serve")
            return True  # for good: the card of the worker differs
