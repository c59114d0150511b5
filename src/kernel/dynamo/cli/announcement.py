"""What `dynamo serve` prints while it comes up: the table of processes, the workers that serve, and Ready."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.cli.console import Console
from dynamo.cli.local_processes import LocalProcesses
from dynamo.cli.readiness import PROGRESS_SECONDS, Address, ready_text, say_inspector, takes_requests, wait_listed
from dynamo.supervise.newcomer import POLL_SECONDS, WorkerRefused
from dynamo.supervise.process import SupervisedProcess


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
