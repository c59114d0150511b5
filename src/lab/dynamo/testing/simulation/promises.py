"""The promises of the product, checked over what happened in one run."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dynamo.router.dispatch.query_of_death import MAX_DEATHS
from dynamo.runtime.client import Client
from dynamo.testing.simulation.client import Answer, MalformedAnswer, Visit, read_answer
from dynamo.testing.simulation.cluster import STREAM_TIMEOUT_SECONDS, Cluster
from dynamo.testing.simulation.engine import continuation
from dynamo.testing.simulation.loop import VirtualLoop
from dynamo.testing.simulation.record import RunRecord
from dynamo.testing.simulation.scenario import FaultKind

CANCEL_SECONDS: Final = 0.5  # a vanished client's engine stops within this and one token, faults aside
ERROR_STATUSES: Final = frozenset({404, 422, 500, 503, 504, 529})
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
# Beyond that, these may end a request with a typed error: no worker is left, or the fault is not the worker's.
LOSSY: Final = frozenset(FaultKind) - {
    FaultKind.SLOW_CLIENT,
    FaultKind.VANISH,
    FaultKind.DRAIN,
    FaultKind.LEASE,
    FaultKind.CLOCK_JUMP,
    FaultKind.DELAY,
}


class Promises:
    """Checks; a broken promise becomes a finding of the record."""

    def __init__(self, record: RunRecord, cluster: Cluster) -> None:
        self._record, self._cluster = record, cluster

    def check_answer(self, visit: Visit) -> None:
        """Check what one client read against what its request, and the faults, allow."""
        plan = visit.plan
        name = f"request {plan.number}"
        try:
            answer = read_answer(visit)
        except MalformedAnswer as error:
            self._record.breach("answer", f"{name}: {error}")
            return
        self._record.note(
            "answer", plan.number, visit.status, sorted(answer.text.items()), sorted(answer.finish.items())
        )
        is_present = visit.left_at is None and not visit.was_cut
        if is_present and not answer.is_whole:
            self._record.breach("answer", f"{name} has no end: {visit.status} {visit.body[-80:]!r}")
        if visit.status is not None and visit.status != 200 and visit.status not in ERROR_STATUSES:
            self._record.breach("answer", f"{name} was answered {visit.status}: {visit.body[:200]!r}")
        if is_present and (answer.error is not None or visit.status != 200):
            self._check_excuse(visit, answer)
        self._check_text(visit, answer)

    def _check_excuse(self, visit: Visit, answer: Answer) -> None:
        """Check an error: it needs a reason among the faults that really happened."""
        # Inside a stream the status is already sent; the event carries what it would have been.
        status = answer.error["code"] if answer.error and visit.status == 200 else visit.status
        kinds = {fault.kind for fault in self._record.fired}
        if visit.status in (503, 529) and not 1 <= int(visit.headers.get(b"retry-after", b"0")) <= 60:
            self._record.breach("overload", f"request {visit.plan.number} was refused and not told when to come again")
        if (
            status == 529
            and self._record.scenario.engine_slots is not None
            and visit.plan.number in self._record.dispatched
        ):
            return
        if status == 529 and visit.plan.number not in self._record.dispatched and self._was_crowded(visit):
            return
        if status == 422 and answer.error and "workers died while they served it" in str(answer.error):
            # A request that was unlucky twice, before its first token, resembles a query of death.
            if sum(fault.kind in LOST_CONNECTIONS for fault in self._record.fired) < MAX_DEATHS:
                self._record.breach(
                    "error", f"request {visit.plan.number} was blamed for deaths that were none: {answer.error}"
                )
            return
        if status == 500 and FaultKind.ENGINE_ERROR not in kinds:
            self._record.breach(
                "error", f"request {visit.plan.number} failed with 500 though no engine did: {answer.error}"
            )
        elif status == 504 and self._silent_seconds() >= STREAM_TIMEOUT_SECONDS:
            return
        elif not kinds & LOSSY or self._somebody_was_left():
            self._record.breach(
                "lost", f"request {visit.plan.number} failed with {status} without a reason: {answer.error}"
            )

    def _was_crowded(self, visit: Visit) -> bool:
        """Return whether the frontend had no room for a request of this urgency when the frontend rejected the request."""
        places, age = self._record.scenario.model_places, self._record.scenario.queue_age_seconds
        now, priority = visit.answered_at or 0.0, visit.plan.priority
        others = [
            other
            for other in self._record.visits.values()
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

    def check_places(self, frontend: str) -> None:
        """Check the admission slots: no frontend serves more requests at once than it has slots."""
        if self._record.scenario.model_places is None:
            return
        links = self._cluster.network.links_from(frontend)
        served = {self._record.plan_of(bytes(wire.body["token_ids"])).number for link in links for wire in link.wires}
        served = {number for number in served if not self._record.visits[number].task.done()}
        if len(served) > self._record.scenario.model_places:
            self._record.breach(
                "overload", f"{frontend} serves {sorted(served)}, and has {self._record.scenario.model_places} places"
            )

    def _somebody_was_left(self) -> bool:
        """Return whether at least one worker was hit by no fault and was known to every frontend."""
        touched = sum(fault.kind in WORKER_KINDS for fault in self._record.fired)
        return {
            fault.kind for fault in self._record.fired
        } <= WORKER_KINDS | HARMLESS and touched < self._record.scenario.workers

    def _silent_seconds(self) -> float:
        """Return how long a frontend may have received nothing, by its clock: it recovers from a jump, not from a later delay."""
        if not any(fault.kind is FaultKind.DELAY for fault in self._record.fired):
            return 0.0
        return sum(
            fault.seconds for fault in self._record.fired if fault.kind in (FaultKind.DELAY, FaultKind.CLOCK_JUMP)
        )

    def _check_text(self, visit: Visit, answer: Answer) -> None:
        plan = visit.plan
        prompt = self._record.prompts.get(plan.number)
        if prompt is None:  # a chat: the template is the product's, so the engines report what they were given
            seen = {
                c.step.origin
                for c in self._cluster.conducts
                if self._record.plan_of(bytes(c.step.prompt)).number == plan.number
            }
            if len(seen) != 1:
                if answer.text and any(answer.text.values()):
                    self._record.breach(
                        "token", f"request {plan.number}: {len(seen)} different prompts reached the engines"
                    )
                return
            (prompt,) = seen
        total = 0
        for choice in sorted(answer.text):
            if not 0 <= choice < plan.choices:
                self._record.breach("token", f"request {plan.number}: there is no choice {choice}")
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
                self._record.breach(
                    "token", f"request {plan.number} choice {choice}: {text!r} does not begin {expected!r}"
                )
            elif finish is not None and (text, finish) != (expected, reason):
                self._record.breach(
                    "token",
                    f"request {plan.number} choice {choice}: {text!r} ({finish}) is not {expected!r} ({reason})",
                )
            total += len(text)
        if answer.error is None and answer.is_whole:
            if sorted(answer.finish) != list(range(plan.choices)):
                self._record.breach("token", f"request {plan.number}: finish reasons of {sorted(answer.finish)} only")
            elif answer.completion_tokens not in (None, total) and plan.stop_at is None:
                self._record.breach(
                    "usage", f"request {plan.number}: usage says {answer.completion_tokens}, {total} came"
                )

    def check_conduct(self) -> None:
        """Aborts, and engines that ran on without a client."""
        slack = CANCEL_SECONDS + sum(
            fault.seconds for fault in self._record.fired if fault.kind is not FaultKind.VANISH
        )
        for conduct in self._cluster.conducts:
            if conduct.is_void:
                continue
            step = conduct.step
            plan = self._record.plan_of(bytes(step.prompt))
            name = f"{conduct.process}, request {plan.number}"
            if conduct.ended_at is None:
                self._record.breach("engine", f"{name}: the generator was never closed")
                continue
            wanted = 1 if conduct.was_cancelled and conduct.reason != "length" else 0
            if conduct.aborts != wanted:
                self._record.breach(
                    "abort", f"{name}: {conduct.aborts} aborts, {wanted} wanted (it ended with {conduct.reason})"
                )
            left = self._record.visits[plan.number].left_at
            if left is not None and conduct.ended_at > left + plan.token_seconds + slack:
                self._record.breach(
                    "cancel", f"{name}: the engine ran on for {conduct.ended_at - left:.3f} s after its client had left"
                )

    def check_idle(self) -> None:
        """Check every counter of requests: it must be at rest when no request is in flight."""
        for frontend in self._cluster.living_frontends:
            self._zero(frontend.name, "places taken", frontend.frontend.admission.in_flight)
            self._zero(frontend.name, "exchanges", len(frontend.frontend.pipeline.register))
            self._zero(frontend.name, "calls in flight", _value(frontend.runtime.caller_metrics.inflight_requests))
            for model in frontend.frontend.models.served():
                self._zero(frontend.name, "places of the model", model.admission.in_flight)
                self._zero(frontend.name, "waiting requests", model.admission.waiting)
            for client in frontend.runtime._clients:
                if isinstance(client, Client):
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
                self._record.breach("leak", f"task {task.get_name()!r} is still there")

    def _zero(self, where: str, what: str, count: float) -> None:
        if count != 0:
            self._record.breach("leak", f"{where}: {count:g} {what} with no request in flight")

    def check_nothing_left(self) -> None:
        """Check for leftovers of the closed cluster: no task, no timer and no record."""
        mine = asyncio.current_task()
        for task in sorted(asyncio.all_tasks(), key=lambda each: each.get_name()):
            if task is not mine:
                self._record.breach("leak", f"task {task.get_name()!r} outlives the cluster")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for handle in loop.armed():
            self._record.breach("leak", f"a timer outlives the cluster: {getattr(handle, '_callback', handle)}")
        for key in self._cluster.hub._records:
            self._record.breach("leak", f"{key} is left in the store")


def _value(gauge: Any) -> float:
    """Return the value of a gauge of our registry."""
    return float(gauge.value)
