"""A decision in words and figures, for whoever wonders why a request went where it went. Pure."""

from __future__ import annotations

from typing import Final, TypedDict

from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement import Placement
from dynamo.placement.kv_state import NO_MATCH, CandidateCost, KvChoice, KvPolicy, KvState, RankMatch, RankState
from dynamo.router.kv_placement import KvPlaced

__all__ = ["ExplainedCandidate", "ExplainedChoice", "ExplainedPlacement", "explain", "explain_placement", "trust_of"]

MAX_CANDIDATES: Final = 64  # of the cheapest ones; an explanation travels in an answer
_UNIT_DIGITS: Final = {"ms": 2}


class ExplainedCandidate(TypedDict):
    """One rank that could have served the request."""

    worker_id: int
    dp_rank: int
    is_chosen: bool
    cost: float
    terms: dict[str, float]  # they add up to the cost
    trust: str
    cached_blocks: dict[str, int]  # by tier
    coming_blocks: int  # that the prefill which runs there now will leave
    active_blocks: int  # of the prompt, held by requests that run
    load: dict[str, float]


class ExcludedRank(TypedDict):
    """One rank that no cost was computed for."""

    worker_id: int
    dp_rank: int
    reason: str


class ExplainedChoice(TypedDict):
    """One decision."""

    summary: str
    policy: str
    unit: str  # of the costs
    reason: str
    tied: int  # candidates with the lowest cost
    draw: float  # the chance that decided between them
    worker_id: int
    dp_rank: int
    trust: str
    prompt_tokens: int
    prompt_blocks: int  # complete ones
    block_size: int
    candidates: list[ExplainedCandidate]  # the cheapest first
    candidates_in_all: int
    excluded: list[ExcludedRank]


class ExplainedPlacement(TypedDict):
    """Where a request went, in the modes that look at no caches."""

    summary: str
    policy: str
    worker_id: int
    reasons: dict[str, float | None]


def explain_placement(placement: Placement) -> ExplainedChoice | ExplainedPlacement:
    """Explain where a request went, in any router mode."""
    if isinstance(placement, KvPlaced):
        selection = placement.selection
        return explain(placement.kv_policy, selection.state, selection.choice)
    return {
        "summary": f"Worker {placement}.",
        "policy": placement.policy,
        "worker_id": placement.candidate.instance_id,
        "reasons": {reason.code: reason.value for reason in placement.reasons},
    }


def trust_of(placement: Placement) -> str | None:
    """Return how far it was known what the chosen worker holds; None in the modes that look at no caches."""
    return str(placement.selection.trust) if isinstance(placement, KvPlaced) else None


def explain(policy: KvPolicy, state: KvState, made: KvChoice) -> ExplainedChoice:
    """Explain the choice that `policy` made from `state`. The costs are computed again, with their terms."""
    choice = made if made.candidates else policy.choose(state, made.draw, with_terms=True)
    known = {each.rank: (position, each) for position, each in enumerate(state.ranks)}
    costs = sorted(choice.candidates, key=lambda each: (each.total, each.rank != choice.rank))
    if len(costs) > MAX_CANDIDATES:
        chosen = next(each for each in costs if each.rank == choice.rank)
        costs = costs[:MAX_CANDIDATES] if chosen in costs[:MAX_CANDIDATES] else [*costs[: MAX_CANDIDATES - 1], chosen]
    candidates = []
    for each in costs:
        position, record = known[each.rank]
        candidates.append(_candidate(each, record, state.matches.get(position, NO_MATCH), choice.rank))
    record = state.ranks[choice.position]
    return {
        "summary": _summary(state, choice, costs),
        "policy": choice.policy,
        "unit": choice.unit,
        "reason": choice.reason,
        "tied": choice.tied,
        "draw": choice.draw,
        "worker_id": choice.rank.worker_id,
        "dp_rank": choice.rank.dp_rank,
        "trust": str(record.trust),
        "prompt_tokens": state.request.prompt_tokens,
        "prompt_blocks": state.request.complete_blocks,
        "block_size": state.block_size,
        "candidates": candidates,
        "candidates_in_all": len(choice.candidates),
        "excluded": [
            {"worker_id": each.rank.worker_id, "dp_rank": each.rank.dp_rank, "reason": each.reason}
            for each in state.excluded[:MAX_CANDIDATES]
        ],
    }


def _candidate(cost: CandidateCost, record: RankState, match: RankMatch, chosen: WorkerRank) -> ExplainedCandidate:
    overlap = match.overlap
    return {
        "worker_id": cost.rank.worker_id,
        "dp_rank": cost.rank.dp_rank,
        "is_chosen": cost.rank == chosen,
        "cost": cost.total,
        "terms": {term.name: term.value for term in cost.terms},
        "trust": str(cost.trust),
        "cached_blocks": {"device": overlap.device, "host": overlap.host, "disk": overlap.disk},
        "coming_blocks": match.coming_blocks,
        "active_blocks": match.active_blocks,
        "load": {
            "requests": record.requests,
            "streams": record.streams,
            "prefill_tokens": record.prefill_tokens,
            "decode_blocks": record.decode_blocks,
            "waiting_tokens": record.waiting_tokens,
        },
    }


def _summary(state: KvState, choice: KvChoice, costs: list[CandidateCost]) -> str:
    """Say the decision in one or two sentences."""
    match = state.matches.get(choice.position, NO_MATCH)
    blocks, held = state.request.complete_blocks, _held(match.overlap)
    said = (
        f"Worker {_name(choice.rank)} costs {_amount(choice, choice.cost)} and holds {held} of the prompt's {blocks} "
        f"complete blocks of {state.block_size} tokens"
    )
    others = [each for each in costs if each.rank != choice.rank]
    if state.request.is_pinned:
        return f"{said}; the request names this worker."
    if not others:
        return f"{said}; no other worker may serve the request."
    if choice.tied > 1:
        return f"{said}. {choice.tied} workers cost the same, and chance decided between them."
    best = others[0]
    if best.total < choice.cost:
        return f"{said}. Worker {_name(best.rank)} costs less ({_amount(choice, best.total)}): {choice.reason}."
    return f"{said}. The next best, worker {_name(best.rank)}, costs {_amount(choice, best.total)}."


def _held(overlap: Overlap) -> int:
    return overlap.device + overlap.host + overlap.disk


def _name(rank: WorkerRank) -> str:
    return f"{rank.worker_id:x}" + (f" rank {rank.dp_rank}" if rank.dp_rank else "")


def _amount(choice: KvChoice, cost: float) -> str:
    return f"{cost:.{_UNIT_DIGITS.get(choice.unit, 1)}f} {choice.unit}"
