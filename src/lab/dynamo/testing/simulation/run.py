"""One run: carry out a scenario, then check whether every promise was kept."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.errors import DynamoException
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.runtime.observe.known_failures import LOGGED
from dynamo.testing.simulation.client import Visit
from dynamo.testing.simulation.cluster import (
    MODEL,
    Cluster,
    FrontendProcess,
    Process,
    WorkerProcess,
)
from dynamo.testing.simulation.engine import Step, continuation
from dynamo.testing.simulation.loop import NothingWillHappen, VirtualLoop, run_virtual
from dynamo.testing.simulation.network import ItemFault, Wire
from dynamo.testing.simulation.promises import Promises
from dynamo.testing.simulation.record import FIRST_PROBE, Finding, RunRecord
from dynamo.testing.simulation.scenario import Fault, FaultKind, RequestPlan, Scenario
from dynamo.testing.simulation.store import wipe

__all__ = ["Finding", "Outcome", "run_scenario"]

REQUEST_LIMIT_SECONDS: Final = 900.0  # beyond it a request hangs: every wait in the product is far shorter
FOREVER_SECONDS: Final = 2 * REQUEST_LIMIT_SECONDS  # a stall without an end
SETTLE_SECONDS: Final = 60.0  # longer than any quarantine, lease, keep-alive or patience of the product


_ITEM_FAULTS: Final = {
    FaultKind.DUPLICATE: ItemFault.DUPLICATE,
    FaultKind.CUT: ItemFault.CUT,
    FaultKind.REORDER: ItemFault.REORDER,
}
_CLIENT_KINDS: Final = frozenset({FaultKind.SLOW_CLIENT, FaultKind.VANISH})
_ENGINE_KINDS: Final = frozenset({FaultKind.STALL, FaultKind.ENGINE_ERROR})
_CLUSTER_KINDS: Final = frozenset(FaultKind) - _CLIENT_KINDS - _ENGINE_KINDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to. Two runs of a scenario have the same `digest`."""

    scenario: Scenario
    findings: tuple[Finding, ...]
    fired: tuple[Fault, ...]
    digest: str
    virtual_seconds: float
    statuses: tuple[int | None, ...]
    trace: tuple[str, ...] = ()


class EngineFailure(RuntimeError):
    """The simulated engine fails, as planned."""


def run_scenario(scenario: Scenario, *, keep_trace: bool = False) -> Outcome:
    """Carry out one scenario on a loop of its own."""
    run = _Run(scenario, keep_trace)
    loop = VirtualLoop(shuffle=random.Random(f"{scenario.seed} order") if scenario.shuffle else None)
    began = loop.time()
    log = logging.getLogger("dynamo")
    level, propagate = log.level, log.propagate
    log.addHandler(run)
    log.propagate = False
    log.setLevel(logging.WARNING)
    was_collecting = gc.isenabled()
    gc.disable()  # a collector that closes generators at its own time would make two runs differ
    try:
        run_virtual(run.main(), loop=loop)
    except NothingWillHappen as error:
        run.record.breach("hang", str(error))
    finally:
        log.removeHandler(run)
        log.propagate = propagate
        log.setLevel(level)
        if was_collecting:
            gc.enable()
    for complaint in loop.complaints:
        run.record.breach("loop", f"{complaint.get('message')}: {complaint.get('exception')!r}")
    run.record.note("turns", loop.turns)
    return Outcome(
        scenario,
        tuple(run.record.findings),
        tuple(run.record.fired),
        run.record.digest(),
        loop.time() - began,
        tuple(visit.status for visit in run.record.visits.values()),
        tuple(run.record.trace),
    )


class _Run(logging.Handler):
    """The state of one run. As a logging handler it receives what the product itself logs as its own fault."""

    def __init__(self, scenario: Scenario, keep_trace: bool) -> None:
        super().__init__(logging.ERROR)
        LOGGED.forget()  # what another run of this process logged must be a breach in this one, too
        self.record = RunRecord(scenario, keep_trace=keep_trace)
        self._pending: list[Fault] = list(scenario.faults)
        self._chores = Background()
        self._items: Counter[int] = Counter()
        self._cluster = Cluster(self.record, self._pace)
        self._promises = Promises(self.record, self._cluster)
        hooks = self._cluster.network.hooks
        hooks.on_open, hooks.on_item = self._opened, self._item

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, DynamoException | EngineFailure):
            return
        if isinstance(error.__cause__, EngineFailure):
            return
        self.record.breach("log", f"{record.getMessage()}: {type(error).__name__}: {error}")

    # -- the run -----------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        scenario, cluster, loop = self.record.scenario, self._cluster, asyncio.get_running_loop()
        for _ in range(scenario.workers):
            await cluster.start_worker()
        for _ in range(scenario.frontends):
            await cluster.start_frontend()
        for frontend in cluster.frontends:
            await self._until_served(frontend)
        for plan in scenario.requests:
            loop.call_later(plan.at_seconds, self._send, plan)
        await asyncio.sleep(max((plan.at_seconds for plan in scenario.requests), default=0.0) + 1e-3)
        await self._ended([visit.task for visit in self.record.visits.values()])
        while self._chores:
            await self._chores.wait()
        await self._settle()
        self._promises.check_idle()
        await self._probe()
        await asyncio.sleep(SETTLE_SECONDS)
        self._promises.check_idle()
        await cluster.close()
        await asyncio.sleep(SETTLE_SECONDS)
        self._promises.check_nothing_left()
        for visit in self.record.visits.values():
            self._promises.check_answer(visit)
        self._promises.check_conduct()

    async def _settle(self) -> None:
        """Wait until whatever is on its way has arrived. While the machine is suspended nothing does: that time does not count."""
        while True:
            jumps = self._count_jumps()
            await asyncio.sleep(SETTLE_SECONDS)
            if jumps == self._count_jumps():
                return

    def _count_jumps(self) -> int:
        return sum(fault.kind is FaultKind.CLOCK_JUMP for fault in self.record.fired)

    async def _ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        if not tasks:
            return
        _, hung = await asyncio.wait(tasks, timeout=REQUEST_LIMIT_SECONDS)
        for task in hung:
            self.record.breach("hang", f"{task.get_name()} is open after {REQUEST_LIMIT_SECONDS:g} s")
            task.cancel()
        if hung:
            await asyncio.wait(hung)

    async def _until_served(self, frontend: FrontendProcess) -> None:
        async with asyncio.timeout(REQUEST_LIMIT_SECONDS):
            models = frontend.frontend.models
            await models.wait_for(lambda: models.lookup(MODEL) is not None)

    def _send(self, plan: RequestPlan) -> None:
        """Send a client's request to any frontend that takes requests."""
        frontends = self._cluster.living_frontends or self._cluster.frontends
        frontend = frontends[plan.frontend % len(frontends)]
        prompt = f"<{plan.number}> of {self.record.scenario.seed}"
        body: dict[str, Any] = {"model": MODEL, "max_tokens": plan.max_tokens, "n": plan.choices, "seed": plan.seed}
        if plan.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
            self.record.prompts[plan.number] = prompt.encode()
        if plan.stop_at is not None:
            said = bytes(continuation(prompt.encode(), plan.max_tokens, seed=plan.seed))
            body["stop"] = said[plan.stop_at : plan.stop_at + 2].decode()
        if plan.is_streaming:
            body["stream"] = True
            if plan.wants_usage:
                body["stream_options"] = {"include_usage": True}
        if plan.priority:
            body["nvext"] = {"agent_hints": {"priority": plan.priority}}
        self.record.note("sent", plan.number, frontend.name)
        visit = Visit(
            frontend.frontend.asgi,
            plan,
            body,
            on_chunk=self._chunk,
            on_breach=lambda text: self.record.breach("answer", text),
        )
        visit.frontend = frontend.name
        self.record.visits[plan.number] = visit
        self._reach_client(visit, 0)

    async def _probe(self) -> None:
        """Check the cluster after all faults: it must serve normally."""
        for position, frontend in enumerate(self._cluster.living_frontends):
            plan = RequestPlan(
                number=FIRST_PROBE + position,
                at_seconds=0.0,
                frontend=position,
                is_chat=False,
                is_streaming=True,
                choices=1,
                max_tokens=3,
                tokens_per_chunk=1,
                token_seconds=0.01,
                seed=1,
                stop_at=None,
                wants_usage=True,
                can_push=True,
                body_parts=1,
            )
            self.record.plans[plan.number] = plan
            self._send(plan)
            visit = self.record.visits[plan.number]
            await self._ended([visit.task])
            if visit.status != 200 or b'"error"' in visit.body:
                self.record.breach(
                    "recovery", f"{frontend.name} answers {visit.status} long after the last fault: {visit.body!r}"
                )
        if not self._cluster.living_frontends:
            self.record.breach("recovery", "no frontend is left")

    # -- faults ------------------------------------------------------------------------------------------------------

    def _take(self, number: int, point: int, kinds: frozenset[FaultKind], *processes: str) -> list[Fault]:
        """Return the faults that are due now, at one of these processes; each fires once."""
        if not self._pending:
            return []
        due = [
            f
            for f in self._pending
            if (f.request == number or (f.request is None and number < FIRST_PROBE))
            and f.point == point
            and f.kind in kinds
            and (f.process is None or any(map(f.is_at, processes)))
        ]
        for fault in due:
            self._pending.remove(fault)
            self.record.fired.append(fault)
            self.record.note("fault", fault)
        return due

    def _opened(self, wire: Wire) -> None:
        number = self.record.plan_of(bytes(wire.body["token_ids"])).number
        self.record.note("open", number, wire.caller, wire.worker)
        self.record.dispatched.add(number)
        self._promises.check_places(wire.caller)
        for fault in self._take(number, 0, _CLUSTER_KINDS, wire.worker, wire.caller):
            asyncio.get_running_loop().call_soon(self._inflict, fault, wire)

    def _item(self, wire: Wire, item: StreamItem, _: int) -> ItemFault | None:
        number = self.record.plan_of(bytes(wire.body["token_ids"])).number
        self._items[number] += 1
        self.record.note("item", number, item.index, item.offset, bytes(item.token_ids), item.finish_reason)
        due = self._take(number, self._items[number], _CLUSTER_KINDS, wire.worker, wire.caller)
        for fault in due:
            if fault.kind not in _ITEM_FAULTS:
                # Not inside the worker's own call: what happens to a connection is noticed at the next turn.
                asyncio.get_running_loop().call_soon(self._inflict, fault, wire)
        return next((_ITEM_FAULTS[fault.kind] for fault in due if fault.kind in _ITEM_FAULTS), None)

    def _inflict(self, fault: Fault, wire: Wire) -> None:
        cluster, loop = self._cluster, asyncio.get_running_loop()
        worker = next(each for each in cluster.workers if each.name == wire.worker)
        frontend = next(each for each in cluster.frontends if each.name == wire.caller)
        match fault.kind:
            case FaultKind.DELAY:
                wire.link.hold(fault.seconds)
            case FaultKind.PARTITION:
                wire.link.hold(fault.seconds, fault.way)
            case FaultKind.DROP:
                wire.link.lose("the connection was reset")
            case FaultKind.FREEZE:
                worker.freeze(fault.seconds)
            case FaultKind.LEASE:
                cluster.hub.expire(worker.discovery.lease_id)
            case FaultKind.STORE_CUT:
                cluster.cut_store(worker if fault.way == "up" else frontend, fault.seconds)
            case FaultKind.STORE_STOP | FaultKind.STORE_WIPE:
                loop.call_later(fault.seconds, self._store_is_back, fault, cluster.stop_store())
            case FaultKind.CLOCK_JUMP:
                assert isinstance(loop, VirtualLoop)
                loop.jump(fault.seconds)
            case FaultKind.CRASH:
                self._crash(worker, fault)
            case FaultKind.DRAIN:
                self._chore(self._drain(worker, fault))
            case FaultKind.FRONTEND_CRASH:
                self._crash_frontend(frontend, fault)
            case FaultKind.FRONTEND_DRAIN:
                self._chore(self._frontend_drain(frontend, fault))
            case _:
                raise AssertionError(fault)

    def _store_is_back(self, fault: Fault, processes: list[Process]) -> None:
        outages = self._cluster.outages
        outages[:] = [outage for outage in outages if outage is not processes]
        if fault.kind is FaultKind.STORE_WIPE:
            wipe(self._cluster.hub)
        order = random.Random(f"{self.record.scenario.seed} {fault}")
        order.shuffle(processes)
        for process in processes:
            process.discovery.reconnect()

    def _chore(self, work: Any) -> None:
        self._chores.start(work, "chore", is_awaited=True)

    def _crash(self, worker: WorkerProcess, fault: Fault) -> None:
        if not worker.is_dead:
            worker.kill()
            self._chore(self._replace_worker(fault.seconds))

    def _crash_frontend(self, frontend: FrontendProcess, fault: Fault) -> None:
        if frontend.is_dead:
            return
        frontend.kill()
        for visit in self.record.visits.values():
            if visit.frontend == frontend.name and not visit.task.done():
                visit.lose()
        self._chore(self._replace_frontend(fault.seconds))

    async def _drain(self, worker: WorkerProcess, fault: Fault) -> None:
        if worker.is_dead or worker.is_leaving:
            return
        # The order of a rolling restart: the new one serves before the old one goes.
        await self._replace_worker(0.0)
        await asyncio.sleep(fault.seconds)
        if not worker.is_dead and not worker.is_leaving:
            worker.is_leaving = True
            worker.worker.request_stop()
            await asyncio.wait({worker.task})

    async def _frontend_drain(self, frontend: FrontendProcess, fault: Fault) -> None:
        if frontend.is_dead or frontend.is_leaving:
            return
        await self._replace_frontend(0.0)
        if not frontend.is_dead and not frontend.is_leaving:
            await frontend.down(fault.seconds)

    async def _replace_worker(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._cluster.start_worker()

    async def _replace_frontend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._cluster.start_frontend()

    # -- engines and clients -----------------------------------------------------------------------------------------

    async def _pace(self, worker: WorkerProcess, step: Step) -> None:
        plan = self.record.plan_of(bytes(step.prompt))
        for fault in self._take(plan.number, step.tokens // plan.tokens_per_chunk, _ENGINE_KINDS, worker.name):
            if fault.kind is FaultKind.ENGINE_ERROR:
                raise EngineFailure("the engine failed, as planned")
            if fault.is_patient:
                try:
                    async with asyncio.timeout(fault.seconds or FOREVER_SECONDS):
                        await step.context.async_killed_or_stopped()
                except TimeoutError:
                    pass  # the stall is over
            else:
                await asyncio.sleep(fault.seconds or FOREVER_SECONDS)
        await asyncio.sleep(plan.token_seconds)

    def _chunk(self, visit: Visit) -> None:
        self.record.note("chunk", visit.plan.number, visit.chunks, visit.status)
        self._reach_client(visit, visit.chunks)

    def _reach_client(self, visit: Visit, point: int) -> None:
        for fault in self._take(visit.plan.number, point, _CLIENT_KINDS, visit.frontend):
            if fault.kind is FaultKind.SLOW_CLIENT:
                visit.read_seconds = fault.seconds
            else:
                asyncio.get_running_loop().call_soon(visit.leave)
