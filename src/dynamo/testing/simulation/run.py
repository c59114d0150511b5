"""One run: carry out a scenario, then check whether every promise was kept."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from dynamo.errors import DynamoException
from dynamo.router.query_of_death import MAX_DEATHS
from dynamo.runtime.request_plane.base import StreamItem
from dynamo.runtime.tasks import Background
from dynamo.testing.simulation.client import Answer, MalformedAnswer, Visit, read_answer
from dynamo.testing.simulation.cluster import (
    MODEL,
    STREAM_TIMEOUT_SECONDS,
    Cluster,
    FrontendProcess,
    Process,
    WorkerProcess,
)
from dynamo.testing.simulation.engine import Step, continuation
from dynamo.testing.simulation.loop import NothingWillHappen, VirtualLoop, run_virtual
from dynamo.testing.simulation.network import ItemFault, Wire
from dynamo.testing.simulation.scenario import Fault, FaultKind, RequestPlan, Scenario
from dynamo.testing.simulation.store import wipe

__all__ = ["Finding", "Outcome", "run_scenario"]

REQUEST_LIMIT_SECONDS: Final = 900.0  # beyond it a request hangs: every wait in the product is far shorter
FOREVER_SECONDS: Final = 2 * REQUEST_LIMIT_SECONDS  # a stall without an end
SETTLE_SECONDS: Final = 60.0  # longer than any quarantine, lease, keep-alive or patience of the product
FIRST_PROBE: Final = 1000  # from this number on requests are not a client's, and nothing is done to them
CANCEL_SECONDS: Final = 0.5  # a vanished client's engine stops within this and one token, faults aside

ERROR_STATUSES: Final = frozenset({404, 500, 503, 504, 529})

# Each of these may take one worker from a request. While there are more workers than such faults, no request may notice.
WORKER_KINDS: Final = frozenset(
    {
        FaultKind.DROP,
        FaultKind.DUPLICATE,
        FaultKind.CUT,
        FaultKind.REORDER,
        FaultKind.PARTITION,
        FaultKind.CRASH,
        FaultKind.FREEZE,
        FaultKind.STALL,
    }
)
LOST_CONNECTIONS: Final = frozenset(
    {FaultKind.DROP, FaultKind.PARTITION, FaultKind.CRASH, FaultKind.FREEZE}
)  # a worker's death, as seen from afar
HARMLESS: Final = frozenset(
    {FaultKind.SLOW_CLIENT, FaultKind.VANISH, FaultKind.DRAIN, FaultKind.LEASE, FaultKind.DELAY}
)

# Beyond that, these may end a request with a typed error: nobody is left, or the fault is not the worker's.
LOSSY: Final = frozenset(FaultKind) - {
    FaultKind.SLOW_CLIENT,
    FaultKind.VANISH,
    FaultKind.DRAIN,
    FaultKind.LEASE,
    FaultKind.CLOCK_JUMP,
    FaultKind.DELAY,
}

_ITEM_FAULTS: Final = {
    FaultKind.DUPLICATE: ItemFault.DUPLICATE,
    FaultKind.CUT: ItemFault.CUT,
    FaultKind.REORDER: ItemFault.REORDER,
}
_CLIENT_KINDS: Final = frozenset({FaultKind.SLOW_CLIENT, FaultKind.VANISH})
_ENGINE_KINDS: Final = frozenset({FaultKind.STALL, FaultKind.ENGINE_ERROR})
_CHANCE_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PROMPT: Final = re.compile(rb"<(\d+)>")


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


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
        run.breach("hang", str(error))
    finally:
        log.removeHandler(run)
        log.propagate = propagate
        log.setLevel(level)
        if was_collecting:
            gc.enable()
    for complaint in loop.complaints:
        run.breach("loop", f"{complaint.get('message')}: {complaint.get('exception')!r}")
    run.note("turns", loop.turns)
    return Outcome(
        scenario,
        tuple(run.findings),
        tuple(run.fired),
        run.digest(),
        loop.time() - began,
        tuple(visit.status for visit in run.visits.values()),
        tuple(run.trace),
    )


class _Run(logging.Handler):
    """The state of one run. As a logging handler it receives what the product itself logs as its own fault."""

    def __init__(self, scenario: Scenario, keep_trace: bool) -> None:
        super().__init__(logging.ERROR)
        self.scenario = scenario
        self.findings: list[Finding] = []
        self.fired: list[Fault] = []
        self.trace: list[str] = []
        self.visits: dict[int, Visit] = {}
        self._keep_trace = keep_trace
        self._hash = blake2b(digest_size=16)
        self._plans: dict[int, RequestPlan] = {plan.number: plan for plan in scenario.requests}
        self._pending: list[Fault] = list(scenario.faults)
        self._prompts: dict[int, bytes] = {}
        self._chores = Background()
        self._items: Counter[int] = Counter()
        self._dispatched: set[int] = set()  # requests that reached a worker's wire
        self._cluster = Cluster(
            scenario,
            pace=self._pace,
            tokens_per_chunk=lambda step: self._plan_of(bytes(step.prompt)).tokens_per_chunk,
            note=self.note,
            breach=self.breach,
        )
        self._cluster.network.on_open = self._opened
        self._cluster.network.on_item = self._item

    # -- what is noted -----------------------------------------------------------------------------------------------

    def note(self, event: str, *details: object) -> None:
        """Add one line to the trace."""
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:
            now = 0.0
        line = f"{now:.6f} {event} {' '.join(map(str, details))}"
        self._hash.update(line.encode())
        if self._keep_trace:
            self.trace.append(line)

    def breach(self, kind: str, text: str) -> None:
        text = _CHANCE_ID.sub("<id>", text)  # ids are the one thing that two runs of a seed do not share
        self.note("finding", kind, text)
        self.findings.append(Finding(kind, text))

    def digest(self) -> str:
        return self._hash.hexdigest()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, DynamoException | EngineFailure):
            return
        if isinstance(error.__cause__, EngineFailure):
            return
        self.breach("log", f"{record.getMessage()}: {type(error).__name__}: {error}")

    # -- the run -----------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        scenario, cluster, loop = self.scenario, self._cluster, asyncio.get_running_loop()
        for _ in range(scenario.workers):
            await cluster.start_worker()
        for _ in range(scenario.frontends):
            await cluster.start_frontend()
        for frontend in cluster.frontends:
            await self._until_served(frontend)
        for plan in scenario.requests:
            loop.call_later(plan.at_seconds, self._send, plan)
        await asyncio.sleep(max((plan.at_seconds for plan in scenario.requests), default=0.0) + 1e-3)
        await self._ended([visit.task for visit in self.visits.values()])
        while self._chores:
            await self._chores.wait()
        await self._settle()
        self._check_idle()
        await self._probe()
        await asyncio.sleep(SETTLE_SECONDS)
        self._check_idle()
        await cluster.close()
        await asyncio.sleep(SETTLE_SECONDS)
        self._check_nothing_left()
        for visit in self.visits.values():
            self._check_answer(visit)
        self._check_conduct()

    async def _settle(self) -> None:
        """Wait until whatever is on its way has arrived. While the machine is suspended nothing does: that time does not count."""
        while True:
            jumps = self._count_jumps()
            await asyncio.sleep(SETTLE_SECONDS)
            if jumps == self._count_jumps():
                return

    def _count_jumps(self) -> int:
        return sum(fault.kind is FaultKind.CLOCK_JUMP for fault in self.fired)

    async def _ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        if not tasks:
            return
        _, hung = await asyncio.wait(tasks, timeout=REQUEST_LIMIT_SECONDS)
        for task in hung:
            self.breach("hang", f"{task.get_name()} is open after {REQUEST_LIMIT_SECONDS:g} s")
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
        prompt = f"<{plan.number}> of {self.scenario.seed}"
        body: dict[str, Any] = {"model": MODEL, "max_tokens": plan.max_tokens, "n": plan.choices, "seed": plan.seed}
        if plan.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
            self._prompts[plan.number] = prompt.encode()
        if plan.stop_at is not None:
            said = bytes(continuation(prompt.encode(), plan.max_tokens, seed=plan.seed))
            body["stop"] = said[plan.stop_at : plan.stop_at + 2].decode()
        if plan.is_streaming:
            body["stream"] = True
            if plan.wants_usage:
                body["stream_options"] = {"include_usage": True}
        if plan.priority:
            body["nvext"] = {"agent_hints": {"priority": plan.priority}}
        self.note("sent", plan.number, frontend.name)
        visit = Visit(
            frontend.frontend.asgi,
            plan,
            body,
            on_chunk=self._chunk,
            on_breach=lambda text: self.breach("answer", text),
        )
        visit.frontend = frontend.name
        self.visits[plan.number] = visit
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
            self._plans[plan.number] = plan
            self._send(plan)
            visit = self.visits[plan.number]
            await self._ended([visit.task])
            if visit.status != 200 or b'"error"' in visit.body:
                self.breach(
                    "recovery", f"{frontend.name} answers {visit.status} long after the last fault: {visit.body!r}"
                )
        if not self._cluster.living_frontends:
            self.breach("recovery", "no frontend is left")

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
            self.fired.append(fault)
            self.note("fault", fault)
        return due

    def _opened(self, wire: Wire) -> None:
        number = self._plan_of(bytes(wire.body["token_ids"])).number
        self.note("open", number, wire.caller, wire.worker)
        self._dispatched.add(number)
        self._check_places(wire.caller)
        for fault in self._take(number, 0, _CLUSTER_KINDS, wire.worker, wire.caller):
            asyncio.get_running_loop().call_soon(self._inflict, fault, wire)

    def _item(self, wire: Wire, item: StreamItem, _: int) -> ItemFault | None:
        number = self._plan_of(bytes(wire.body["token_ids"])).number
        self._items[number] += 1
        self.note("item", number, item.index, item.offset, bytes(item.token_ids), item.finish_reason)
        due = self._take(number, self._items[number], _CLUSTER_KINDS, wire.worker, wire.caller)
        for fault in due:
            if fault.kind not in _ITEM_FAULTS:
                # Not inside the worker's own call: what happens to a connection is heard of at the next turn.
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
        order = random.Random(f"{self.scenario.seed} {fault}")
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
        for visit in self.visits.values():
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
        plan = self._plan_of(bytes(step.prompt))
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
        self.note("chunk", visit.plan.number, visit.chunks, visit.status)
        self._reach_client(visit, visit.chunks)

    def _reach_client(self, visit: Visit, point: int) -> None:
        for fault in self._take(visit.plan.number, point, _CLIENT_KINDS, visit.frontend):
            if fault.kind is FaultKind.SLOW_CLIENT:
                visit.read_seconds = fault.seconds
            else:
                asyncio.get_running_loop().call_soon(visit.leave)

    def _plan_of(self, prompt: bytes) -> RequestPlan:
        found = _PROMPT.search(prompt)
        assert found is not None, prompt
        return self._plans[int(found[1])]

    # -- promises ----------------------------------------------------------------------------------------------------

    def _check_answer(self, visit: Visit) -> None:
        plan = visit.plan
        name = f"request {plan.number}"
        try:
            answer = read_answer(visit)
        except MalformedAnswer as error:
            self.breach("answer", f"{name}: {error}")
            return
        self.note("answer", plan.number, visit.status, sorted(answer.text.items()), sorted(answer.finish.items()))
        is_present = visit.left_at is None and not visit.was_cut
        if is_present and not answer.is_whole:
            self.breach("answer", f"{name} has no end: {visit.status} {visit.body[-80:]!r}")
        if visit.status is not None and visit.status != 200 and visit.status not in ERROR_STATUSES:
            self.breach("answer", f"{name} was answered {visit.status}: {visit.body[:200]!r}")
        if is_present and (answer.error is not None or visit.status != 200):
            self._check_excuse(visit, answer)
        self._check_text(visit, answer)

    def _check_excuse(self, visit: Visit, answer: Answer) -> None:
        """Check an error: it needs a reason among the faults that really happened."""
        # Inside a stream the status is already sent; the event says what it would have been.
        status = answer.error["code"] if answer.error and visit.status == 200 else visit.status
        kinds = {fault.kind for fault in self.fired}
        if visit.status in (503, 529) and not 1 <= int(visit.headers.get(b"retry-after", b"0")) <= 60:
            self.breach("overload", f"request {visit.plan.number} was refused and not told when to come again")
        if status == 529 and self.scenario.engine_slots is not None and visit.plan.number in self._dispatched:
            return
        if status == 529 and visit.plan.number not in self._dispatched and self._was_crowded(visit):
            return
        if status == 500 and answer.error and "workers died while they served it" in str(answer.error):
            # A request that was unlucky twice, before its first token, looks like a query of death.
            if sum(fault.kind in LOST_CONNECTIONS for fault in self.fired) < MAX_DEATHS:
                self.breach(
                    "error", f"request {visit.plan.number} was blamed for deaths that were none: {answer.error}"
                )
            return
        if status == 500 and FaultKind.ENGINE_ERROR not in kinds:
            self.breach("error", f"request {visit.plan.number} failed with 500 though no engine did: {answer.error}")
        elif status == 504 and self._silent_seconds() >= STREAM_TIMEOUT_SECONDS:
            return
        elif not kinds & LOSSY or self._somebody_was_left():
            self.breach("lost", f"request {visit.plan.number} failed with {status} without a reason: {answer.error}")

    def _was_crowded(self, visit: Visit) -> bool:
        """Return whether the frontend had no room for a request of this urgency when the frontend rejected the request."""
        places, age = self.scenario.model_places, self.scenario.queue_age_seconds
        now, priority = visit.answered_at or 0.0, visit.plan.priority
        others = [
            other
            for other in self.visits.values()
            if other is not visit
            and other.frontend == visit.frontend
            and other.began_at <= now
            and (other.ended_at is None or other.ended_at >= now)
        ]
        if places is not None and len(others) >= places - (
            places // 5 if priority < 0 else 0 if priority else places // 10
        ):
            return True
        patience = None if age is None else age * (0.5 if priority < 0 else 2.0 if priority else 1.0)
        return patience is not None and any(
            now - other.began_at > patience and (other.first_text_at is None or other.first_text_at >= now)
            for other in others
        )

    def _check_places(self, frontend: str) -> None:
        """Check the admission slots: no frontend serves more requests at once than it has slots."""
        if self.scenario.model_places is None:
            return
        links = self._cluster.network.links_from(frontend)
        served = {self._plan_of(bytes(wire.body["token_ids"])).number for link in links for wire in link.wires}
        served = {number for number in served if not self.visits[number].task.done()}
        if len(served) > self.scenario.model_places:
            self.breach("overload", f"{frontend} serves {sorted(served)}, and has {self.scenario.model_places} places")

    def _somebody_was_left(self) -> bool:
        """Return whether at least one worker was hit by no fault and was known to every frontend."""
        touched = sum(fault.kind in WORKER_KINDS for fault in self.fired)
        return {fault.kind for fault in self.fired} <= WORKER_KINDS | HARMLESS and touched < self.scenario.workers

    def _silent_seconds(self) -> float:
        """Return how long a frontend may have received nothing, by its clock: it recovers from a jump, not from a later delay."""
        if not any(fault.kind is FaultKind.DELAY for fault in self.fired):
            return 0.0
        return sum(fault.seconds for fault in self.fired if fault.kind in (FaultKind.DELAY, FaultKind.CLOCK_JUMP))

    def _check_text(self, visit: Visit, answer: Answer) -> None:
        plan = visit.plan
        prompt = self._prompts.get(plan.number)
        if prompt is None:  # a chat: the template is the product's, so ask the engines what they were given
            seen = {
                c.step.origin
                for c in self._cluster.conducts
                if self._plan_of(bytes(c.step.prompt)).number == plan.number
            }
            if len(seen) != 1:
                if answer.text and any(answer.text.values()):
                    self.breach("token", f"request {plan.number}: {len(seen)} different prompts reached the engines")
                return
            (prompt,) = seen
        total = 0
        for choice in sorted(answer.text):
            if not 0 <= choice < plan.choices:
                self.breach("token", f"request {plan.number}: there is no choice {choice}")
                continue
            said = bytes(continuation(prompt, plan.max_tokens, seed=plan.seed + choice)).decode()
            expected, reason = said, "length"
            if plan.stop_at is not None:
                first = bytes(continuation(prompt, plan.max_tokens, seed=plan.seed)).decode()
                stop = first[plan.stop_at : plan.stop_at + 2]
                if (at := said.find(stop)) >= 0:
                    expected, reason = said[:at], "stop"
            text, finish = answer.text[choice], answer.finish.get(choice)
            if finish is None and not expected.startswith(text):
                self.breach("token", f"request {plan.number} choice {choice}: {text!r} does not begin {expected!r}")
            elif finish is not None and (text, finish) != (expected, reason):
                self.breach(
                    "token",
                    f"request {plan.number} choice {choice}: {text!r} ({finish}) is not {expected!r} ({reason})",
                )
            total += len(text)
        if answer.error is None and answer.is_whole:
            if sorted(answer.finish) != list(range(plan.choices)):
                self.breach("token", f"request {plan.number}: finish reasons of {sorted(answer.finish)} only")
            elif answer.completion_tokens not in (None, total) and plan.stop_at is None:
                self.breach("usage", f"request {plan.number}: usage says {answer.completion_tokens}, {total} came")

    def _check_conduct(self) -> None:
        """Aborts, and engines that ran on for nobody."""
        slack = CANCEL_SECONDS + sum(fault.seconds for fault in self.fired if fault.kind is not FaultKind.VANISH)
        for conduct in self._cluster.conducts:
            if conduct.is_void:
                continue
            step = conduct.step
            plan = self._plan_of(bytes(step.prompt))
            name = f"{conduct.process}, request {plan.number}"
            if conduct.ended_at is None:
                self.breach("engine", f"{name}: the generator was never closed")
                continue
            wanted = 1 if conduct.was_cancelled and conduct.reason != "length" else 0
            if conduct.aborts != wanted:
                self.breach(
                    "abort", f"{name}: {conduct.aborts} aborts, {wanted} wanted (it ended with {conduct.reason})"
                )
            left = self.visits[plan.number].left_at
            if left is not None and conduct.ended_at > left + plan.token_seconds + slack:
                self.breach(
                    "cancel", f"{name}: the engine ran on for {conduct.ended_at - left:.3f} s after its client had left"
                )

    def _check_idle(self) -> None:
        """Check every counter of requests: it must be at rest when no request is in flight."""
        for frontend in self._cluster.living_frontends:
            self._zero(frontend.name, "places taken", frontend.frontend.admission.in_flight)
            self._zero(frontend.name, "exchanges", len(frontend.frontend.exchanges))
            self._zero(frontend.name, "calls in flight", _value(frontend.runtime.caller_metrics.inflight_requests))
            for model in frontend.frontend.models.served():
                self._zero(frontend.name, "places of the model", model.admission.in_flight)
                self._zero(frontend.name, "waiting requests", model.admission.waiting)
            for client in frontend.runtime._clients:
                self._zero(frontend.name, "bookings", client._set.loads.total)
            for plane in frontend.runtime.planes.clients.values():
                self._zero(frontend.name, "open streams", len(plane._streams))  # type: ignore[attr-defined]
        for worker in self._cluster.living_workers:
            self._zero(worker.name, "generators", worker.engine.running)
            core = worker.runtime.planes.core
            if core is not None:
                self._zero(worker.name, "running requests", core.running)
                self._zero(worker.name, "queued requests", core.queued)
            for served in worker.runtime._served.values():
                self._zero(worker.name, "served requests", served.inflight)
        for link in self._cluster.network.all_links():
            self._zero("network", "wires", len(link.wires))
        for task in asyncio.all_tasks():
            if task.get_name().startswith(
                ("request ", "part of ", "abort ", "visit ", "frontend: client", "frontend: keep")
            ):
                self.breach("leak", f"task {task.get_name()!r} is still there")

    def _zero(self, where: str, what: str, count: float) -> None:
        if count != 0:
            self.breach("leak", f"{where}: {count:g} {what} with no request in flight")

    def _check_nothing_left(self) -> None:
        mine = asyncio.current_task()
        for task in sorted(asyncio.all_tasks(), key=lambda each: each.get_name()):
            if task is not mine:
                self.breach("leak", f"task {task.get_name()!r} outlives the cluster")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for handle in loop.armed():
            self.breach("leak", f"a timer outlives the cluster: {getattr(handle, '_callback', handle)}")
        for key in self._cluster.hub._records:
            self.breach("leak", f"{key} is left in the store")


_CLUSTER_KINDS: Final = frozenset(FaultKind) - _CLIENT_KINDS - _ENGINE_KINDS


def _value(gauge: Any) -> float:
    """Return the value of a gauge of our registry."""
    return float(gauge.value)
