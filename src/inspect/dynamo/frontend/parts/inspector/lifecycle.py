"""Follows the workers of the cluster as they come and go, for the events and the ages that the inspector shows."""

from __future__ import annotations

import asyncio

from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.events import EventLog
from dynamo.frontend.parts.inspector.stream_rows import worker_name


class WorkerLifecycle:
    """Checks the workers whenever they have changed, and at no other time."""

    def __init__(self, models: ModelDirectory, events: EventLog, clock: InspectorClock) -> None:
        self._models, self._events, self._clock = models, events, clock
        self.first_seen: dict[str, float] = {}
        """When each worker that is there came, by id: loop times."""
        self._served: dict[str, str] = {}  # by worker, what it serves
        self._conflicts: set[str] = set()  # keys of cards that differ from the one in service
        self._circuits: dict[str, float] = {}  # workers in quarantine

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self.look()
            await self._models.change()

    def look(self) -> None:
        """Compare the workers with those of the last check."""
        now = self._clock.now()
        served: dict[str, str] = {}
        conflicts: dict[str, tuple[str, str]] = {}
        for group in self._models.groups():
            pool = self._models.pool_of(group.key)
            for entry in group.accepted:
                if pool is None or pool.instance(entry.instance_id) is not None:
                    served.setdefault(worker_name(entry.instance_id), group.key.model)
            for entry in group.rejected:
                conflicts[entry.key] = worker_name(entry.instance_id), group.key.model
        for name in served.keys() - self._served.keys():
            self.first_seen[name] = now
            self._events.add("worker joined", f"worker {name} serves {served[name]}", worker=name, model=served[name])
        for name in self._served.keys() - served.keys():
            self.first_seen.pop(name, None)
            model = self._served[name]
            self._events.add("worker left", f"worker {name} of {model} has left", worker=name, model=model)
        for key in conflicts.keys() - self._conflicts:
            name, model = conflicts[key]
            text = f"worker {name} gets no requests: its card of {model} differs from the one in service"
            self._events.add("card conflict", text, worker=name, model=model)
        self._served, self._conflicts = served, set(conflicts)

    def look_at_circuits(self) -> None:
        """Note the workers that were quarantined, or answer again, since the last check. Called at each end of a failed request,
        and while a viewer watches."""
        found: dict[str, float] = {}
        for group in self._models.groups():
            if (pool := self._models.pool_of(group.key)) is not None:
                found |= {worker_name(id): until for id, until in pool.circuits().items()}
        for name in found.keys() - self._circuits.keys():
            seconds = max(0.0, found[name] - asyncio.get_running_loop().time())
            text = f"worker {name} is quarantined: a request to it failed; it is tried again in {seconds:.0f} s"
            self._events.add("worker quarantined", text, worker=name)
        for name in self._circuits.keys() - found.keys():
            if name in self._served:
                self._events.add("worker answers", f"worker {name} answers again", worker=name)
        self._circuits = found
