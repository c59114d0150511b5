"""Routing decisions as rows: those of requests, with their candidates while a viewer looks, and those that were only explained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.pipeline.plan import Tally
from dynamo.placement import Candidate, Placement
from dynamo.protocol.inspector.views import CandidateView, RoutingView
from dynamo.router.kv.explain import explain
from dynamo.router.kv.placement import KvPlaced
from dynamo.router.workers.worker_holds import WorkerHolds

KEPT_DECISIONS: Final = 200  # each may hold the state of all ranks
KEPT_UNSEEN: Final = 20  # without a viewer: an operator who comes after the trouble still sees the last ones
LOOK_SECONDS: Final = 30.0  # after the last look, in which every choice is kept as it is made
MAX_CANDIDATES: Final = 64

_RULES: Final = {
    "turn": "each worker in turn",
    "in_flight": "fewest requests of this frontend",
    "only_one_left": "no other worker is left",
    "pinned": "the request names it",
    "session": "its session is bound to it",
    "chance": "by chance",
    "lowest_cost": "lowest cost",
    "all_circuits_open": "no healthy worker is left",
}


_LEFT_OUT: Final = {
    "not_allowed": "drained, quarantined or not for it",
    "excluded": "tried before",
    "not_pinned": "the request names another",
    "other_rank": "the request names another rank",
    "overloaded": "busy",
}


class _Decision:
    """One choice, as it was made."""

    __slots__ = ("at", "candidates", "model", "number", "placement", "request_id", "stage", "view")

    def __init__(
        self, number: int, model: str, candidates: Sequence[Candidate], placement: Placement, at: float
    ) -> None:
        self.number, self.model, self.candidates, self.placement, self.at = number, model, candidates, placement, at
        self.request_id: str | None = None
        self.stage = "decode"
        self.view: RoutingView | None = None  # None: it has to be made


class RoutingLog:
    """The last choices of workers. Used on the event loop only.

    While a viewer looks, each choice is kept as it is made, with its candidates. Else the choices of requests are kept as
    these end, KEPT_UNSEEN of them: so the way of a request to its worker does not lead through here.
    """

    def __init__(self, holds: WorkerHolds, clock: InspectorClock, frontend_id: str) -> None:
        self._holds, self._clock, self._frontend_id = holds, clock, frontend_id
        # By the identity of their placements, which they keep alive; the oldest first. Requests find theirs by it.
        self._decisions: OrderedDict[int, _Decision] = OrderedDict()
        self._number = 0
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._decisions)

    def looked(self) -> None:
        """Keep choices as they are made from now on, for a while."""
        self._looked_at = self._clock.now()
        self._holds.on_choice = self._note

    def _note(self, model: str, candidates: Sequence[Candidate], placement: Placement) -> None:
        now = self._clock.now()
        if now - self._looked_at > LOOK_SECONDS:
            self._holds.on_choice = None
            return
        self._keep(_Decision(0, model, candidates, placement, now), KEPT_DECISIONS)

    def _keep(self, decision: _Decision, most: int) -> None:
        self._number += 1
        decision.number = self._number
        decisions, key = self._decisions, id(decision.placement)
        decisions.pop(key, None)
        decisions[key] = decision
        while len(decisions) > most:
            decisions.popitem(last=False)

    def ended(self, request_id: str, model: str | None, tally: Tally, at: float) -> None:
        """Keep the last choice of a request that has ended `at`, where no viewer was there to see it made."""
        placement = tally.placement
        if self._holds.on_choice is None and placement is not None:
            decision = _Decision(0, model or "", (placement.candidate,), placement, at)
            decision.request_id = request_id
            self._keep(decision, KEPT_UNSEEN)
            if tally.prefill_placement is None:
                return
        self.name(request_id, tally)

    def name(self, request_id: str, tally: Tally) -> None:
        """Note whose choices those of a request are."""
        if not self._decisions:
            return
        for placement, stage in ((tally.placement, "decode"), (tally.prefill_placement, "prefill")):
            decision = None if placement is None else self._decisions.get(id(placement))
            if decision is not None and (decision.request_id, decision.stage) != (request_id, stage):
                decision.request_id, decision.stage, decision.view = request_id, stage, None

    def rows(self, limit: int) -> list[RoutingView]:
        """Return the last choices, the newest first."""
        return [self._row(each) for each in list(self._decisions.values())[::-1][:limit]]

    def choices(self) -> list[Placement]:
        """Return the last choices, and keep them from now on, for a while."""
        self.looked()
        return [each.placement for each in self._decisions.values()]

    def of_request(self, request_id: str, tally: Tally | None) -> list[RoutingView]:
        """Return the choices of one request: those that were kept, or else what its record shows."""
        kept = [self._row(each) for each in self._decisions.values() if each.request_id == request_id]
        if kept or tally is None:
            return kept
        found = []
        for placement, stage in ((tally.prefill_placement, "prefill"), (tally.placement, "decode")):
            if placement is not None:
                view = routing_view(placement, (placement.candidate,), stage=stage)
                view.id, view.request_id, view.at_ms = f"{request_id}/{stage}", request_id, self._clock.now_ms()
                found.append(view)
        return found

    def _row(self, decision: _Decision) -> RoutingView:
        """Return a choice as a row, which is made once. It must not be changed."""
        if decision.view is None:
            decision.view = self._made(decision)
        return decision.view

    def _made(self, decision: _Decision) -> RoutingView:
        view = routing_view(decision.placement, decision.candidates, stage=decision.stage)
        view.id = f"{self._frontend_id}/{decision.number}"
        view.model, view.request_id, view.at_ms = decision.model, decision.request_id, self._clock.ms(decision.at)
        return view


def routing_view(placement: Placement, candidates: Sequence[Candidate], *, stage: str, model: str = "") -> RoutingView:
    """Return a choice in the router's words; `candidates`: what it was made from."""
    if isinstance(placement, KvPlaced):
        return _kv_view(placement, stage, model)
    chosen = placement.candidate.key
    rows = [
        CandidateView(
            worker=worker_name(each.instance_id),
            running=each.in_flight,
            is_chosen=each.key == chosen,
            left_out=None if each.key == chosen else _left_out(each),
        )
        for each in candidates
    ]
    rows.sort(key=lambda row: not row.is_chosen)
    words = [_RULES.get(reason.code, reason.code.replace("_", " ")) for reason in placement.reasons]
    return RoutingView(
        id="",
        request_id=None,
        model=model,
        stage=stage,
        at_ms=0,
        policy=placement.policy,
        decided_by=", ".join(words) or placement.policy,
        candidates=rows[:MAX_CANDIDATES],
        candidates_in_all=len(rows),
    )


def _left_out(candidate: Candidate) -> str | None:
    if candidate.is_busy:
        return "busy"
    return "quarantined" if candidate.is_circuit_open else None


def _kv_view(placement: KvPlaced, stage: str, model: str) -> RoutingView:
    found: Any = explain(placement.kv_policy, placement.selection.state, placement.selection.choice)
    rows = [
        CandidateView(
            worker=each["worker"],
            rank=each["dp_rank"],
            overlap_blocks=each["cached_blocks"]["device"],
            prefill_tokens=each["load"]["prefill_tokens"],
            decode_blocks=round(each["load"]["decode_blocks"], 2),
            running=int(each["load"]["requests"]),
            cost=round(each["cost"], 4),
            is_chosen=each["is_chosen"],
        )
        for each in found["candidates"]
    ]
    rows += [
        CandidateView(
            worker=worker_name(each["worker_id"]),
            rank=each["dp_rank"],
            left_out=_LEFT_OUT.get(each["reason"], each["reason"]),
        )
        for each in found["excluded"]
    ]
    rows.sort(key=lambda row: not row.is_chosen)
    return RoutingView(
        id="",
        request_id=None,
        model=model,
        stage=stage,
        at_ms=0,
        policy=placement.policy,
        decided_by=_RULES.get(found["reason"], found["summary"]),
        prompt_tokens=found["prompt_tokens"],
        block_size=found["block_size"],
        candidates=rows,
        candidates_in_all=found["candidates_in_all"] + len(found["excluded"]),
    )
