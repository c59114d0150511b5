"""Frontends and workers in one process, each with a runtime of its own, as if they were processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

from dynamo.contract.config import WorkerConfig
from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.app import Frontend
from dynamo.frontend.base.offload import InlineOffload
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.base.settings import RequestPlaneSettings, RuntimeSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.discovery.memory import MemoryHub
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.testing.simulation.engine import PrefixEngine, Step
from dynamo.testing.simulation.network import Network
from dynamo.testing.simulation.record import RunRecord
from dynamo.testing.simulation.store import SimulatedDiscovery
from dynamo.worker.lifecycle import ShutdownTimes
from dynamo.worker.worker import Worker

MODEL: Final = "sim"
STREAM_TIMEOUT_SECONDS: Final = 60.0  # how long a frontend waits for a silent engine
START_LIMIT_SECONDS: Final = 30.0
_TIMES: Final = ShutdownTimes(grace_seconds=1.0, timeout_seconds=60)


class Conduct:
    """What the workers' engines did; one entry for each request that an engine began."""

    def __init__(self, process: str, step: Step) -> None:
        self.process, self.step = process, step
        self.ended_at: float | None = None
        self.reason: str | None = None
        self.was_cancelled = False  # its context was stopped when it ended
        self.aborts = 0
        self.is_void = False  # its process was killed


class Process:
    """What frontends and workers have in common."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.is_dead = False
        self.is_leaving = False
        rng = cluster.rng(name)
        self.discovery = SimulatedDiscovery(cluster.hub, lease_id=rng.getrandbits(62) | 1)
        self.runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            "mem",
            "mem",
            settings=RuntimeSettings(discovery_backend="mem", request_plane="mem", shutdown_seconds=60.0),
            discovery=self.discovery,
            memory_plane=cluster.network.plane(name),
            rng=rng,
        )
        cluster.network.announce(self.discovery.lease_id, name)
        for outage in cluster.outages:  # born while the store does not answer
            outage.append(self)
            self.discovery.cut_off()

    def kill(self) -> None:
        """Kill the process: the others see broken connections at once, and its records vanish when the lease lapses."""
        self.is_dead = True
        self.discovery.die()
        self.cluster.network.kill(self.name)
        asyncio.get_running_loop().call_later(
            self.cluster.lease_seconds, self.cluster.hub.kill, self.discovery.lease_id
        )


class WorkerProcess(Process):
    """A worker with its engine. Observes the engine, and is where it is made to wait."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        self.engine = PrefixEngine(MODEL, self, tokens_per_chunk=cluster.record.tokens_per_chunk)
        config = WorkerConfig(
            namespace="sim", component="backend", endpoint="generate", served_model_name=MODEL, discovery_backend="mem"
        )
        self.worker = Worker(self.engine, config, runtime=self.runtime, times=_TIMES, embedded=True)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._has_left = False
        # Awaited in `Cluster.close`.
        self.task = asyncio.get_running_loop().create_task(self.worker.run(), name=f"process {name}")

    async def up(self) -> None:
        """Return when it serves. Raises what its start-up raised."""
        serving = asyncio.ensure_future(self.worker.wait_serving())
        async with asyncio.timeout(START_LIMIT_SECONDS):
            await asyncio.wait({serving, self.task}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait({serving})
        if self.task.done():
            await self.task

    def kill(self) -> None:
        super().kill()
        self.thawed.set()
        self.task.cancel()
        for conduct in self.cluster.conducts:
            if conduct.process == self.name:
                conduct.is_void = True

    def freeze(self, seconds: float) -> None:
        """Neither compute nor answer for a while."""
        self.thawed.clear()
        self.cluster.network.freeze(self.name, seconds)
        self.cluster.cut_store(self, seconds)
        asyncio.get_running_loop().call_later(seconds, self.thawed.set)

    # -- what the engine reports ----------------------------------------------------------------------------------------

    def began(self, step: Step) -> None:
        conduct = Conduct(self.name, step)
        conduct.is_void = self.is_dead
        self.cluster.conducts.append(conduct)
        if self.is_dead:
            return
        if self._has_left:
            self.cluster.record.breach("goodbye", f"{self.name} began a request after it had said goodbye")
        self.cluster.record.note("began", self.name, bytes(step.prompt), step.seed)

    async def before_token(self, step: Step) -> None:
        await self.thawed.wait()
        await self.cluster.pace(self, step)
        if not self.is_dead:
            await self.thawed.wait()

    def ended(self, step: Step, reason: str | None) -> None:
        for conduct in self.cluster.conducts:
            if conduct.step is step:
                conduct.ended_at = asyncio.get_running_loop().time()
                conduct.reason = reason
                conduct.was_cancelled = step.context.is_stopped()
        if not self.is_dead:
            self.cluster.record.note("ended", self.name, bytes(step.prompt), step.tokens, reason)

    def aborted(self, context: Context) -> None:
        found = [c for c in self.cluster.conducts if c.process == self.name and c.step.context.id() == context.id()]
        if not found and not self.is_dead:
            self.cluster.record.breach("abort", f"{self.name} was told to abort a request it never began")
        for conduct in found[-1:]:
            conduct.aborts += 1
            if not self.is_dead:
                self.cluster.record.note("abort", self.name, bytes(conduct.step.prompt))

    def said_goodbye(self) -> None:
        self._has_left = True


class FrontendProcess(Process):
    """A frontend."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster, name)
        scenario = cluster.record.scenario
        places = scenario.model_places
        settings = FrontendSettings(
            router_mode=scenario.router_mode,
            max_requests_per_model=None if places is None else RequestLimit(places),
            max_queue_age_seconds=scenario.queue_age_seconds,
            backend_stream_timeout_seconds=STREAM_TIMEOUT_SECONDS,
            model_cache_dir=Path("/nonexistent"),  # a name-only card has no files
        )
        self.frontend = Frontend(
            settings, self.runtime, offload=InlineOffload(), now=lambda: datetime(2026, 1, 1, tzinfo=UTC)
        )

    async def up(self) -> None:
        await self.frontend.start()

    async def down(self, drain_seconds: float) -> None:
        """End a frontend process gracefully."""
        self.is_leaving = True
        if not await self.frontend.drain(drain_seconds):
            self.frontend.cut()
            await self.frontend.admission.wait_idle(5.0)
        await self.frontend.aclose()
        await self.runtime.aclose()

    async def bury(self) -> None:
        """Let what a killed process left behind come to its end."""
        await self.frontend.aclose()
        await self.runtime.aclose()


class Cluster:
    """All processes of one run, alive and dead."""

    def __init__(
        self,
        record: RunRecord,
        pace: Callable[[WorkerProcess, Step], Awaitable[object]],
    ) -> None:
        self.record, self.pace = record, pace
        self.hub = MemoryHub()
        self.conducts: list[Conduct] = []
        self.workers: list[WorkerProcess] = []
        self.frontends: list[FrontendProcess] = []
        self.outages: list[list[Process]] = []  # of the whole store: the processes cut off by it
        self.network = Network(
            self.rng("network"),
            server_settings=RequestPlaneSettings(
                engine_request_limit=record.scenario.engine_slots, engine_queue_limit=4
            ),
        )
        self.network.hooks.on_breach = lambda text: record.breach("credit", text)

    @cached_property
    def lease_seconds(self) -> float:
        """How long a store that cannot be reached keeps the records of a process."""
        return self.rng("lease").choice((0.0, 3.0, 10.0))

    def rng(self, name: str) -> random.Random:
        """Return a separate random generator for each part, so that removing one fault does not change the other parts."""
        return random.Random(f"{self.record.scenario.seed} {name}")

    async def start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self, f"worker {len(self.workers)}")
        self.workers.append(worker)
        await worker.up()
        return worker

    async def start_frontend(self) -> FrontendProcess:
        frontend = FrontendProcess(self, f"frontend {len(self.frontends)}")
        self.frontends.append(frontend)
        await frontend.up()
        return frontend

    @property
    def living_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if not worker.is_dead and not worker.is_leaving]

    @property
    def living_frontends(self) -> list[FrontendProcess]:
        return [each for each in self.frontends if not each.is_dead and not each.is_leaving]

    def cut_store(self, process: Process, seconds: float) -> None:
        """Cut one process off from the store; after the lease's time the others see its records vanish."""
        loop = asyncio.get_running_loop()
        process.discovery.cut_off()
        if seconds > self.lease_seconds:
            loop.call_later(self.lease_seconds, process.discovery.lapse)
        loop.call_later(seconds, process.discovery.reconnect)

    def stop_store(self) -> list[Process]:
        """Cut every process off the store; return those to reconnect. A process that starts meanwhile joins them."""
        outage: list[Process] = [*self.workers, *self.frontends]
        for process in outage:
            process.discovery.cut_off()
        self.outages.append(outage)
        return outage

    async def close(self) -> None:
        """End every process, the living ones gracefully."""
        for frontend in self.frontends:
            if frontend.is_dead or not frontend.is_leaving:
                await (frontend.bury() if frontend.is_dead else frontend.down(5.0))
        for worker in self.workers:
            if not worker.task.done() and not worker.is_dead:
                worker.worker.request_stop()
        tasks = [worker.task for worker in self.workers]
        if tasks:
            await asyncio.wait(tasks, timeout=300.0)
        for worker in self.workers:
            if not worker.task.done():
                self.record.breach("hang", f"{worker.name} did not end")
            elif not worker.task.cancelled() and (error := worker.task.exception()) is not None and not worker.is_dead:
                self.record.breach("worker", f"{worker.name} failed: {type(error).__name__}: {error}")
            await worker.runtime.aclose()
