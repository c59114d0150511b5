"""A decision in words and figures: why a request went where it went. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypedDict

from dynamo.kv.overlap import WorkerRank
from dynamo.placement import Placement
from dynamo.placement.kv_query import Trust
from dynamo.placement.kv_state import NO_MATCH, CandidateCost, KvChoice, KvPolicy, KvState, RankMatch, RankState
from dynamo.router.kv.placement import KvPlaced

NAMED: Final = "the request names it"
MAX_CANDIDATES: Final = 64  # of the cheapest ones; an explanation travels in an answer
_UNIT_DIGITS: Final = {"ms": 2}


class ExplainedCandidate(TypedDict):
    """One rank that could have served the request."""

    worker: str  # its id in hexadecimal digits, as logs have it
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
    meanings: dict[str, str]  # of the words above: the unit, trusts, reasons, and the terms that are not 0


class ExplainedPlacement(TypedDict):
    """Where a request went, in the modes that ignore caches."""

    summary: str
    policy: str
    worker_id: int
    reasons: dict[str, float | None]


def explain_placement(placement: Placement) -> ExplainedChoice | ExplainedPlacement:
    """Explain where a request went, in any router mode."""
    if isinstance(placement, KvPlaced):
        selection = placement.selection
        found = explain(placement.kv_policy, selection.state, selection.choice)
        if any(reason.code == "session" for reason in placement.reasons):
            found["reason"] = "session"
            found["meanings"] = {**found["meanings"], **meanings_of(["session"])}
            found["summary"] = found["summary"].replace(NAMED, "its session is bound to it")
        return found
    return {
        "summary": f"Chose worker {placement}.",
        "policy": placement.policy,
        "worker_id": placement.candidate.instance_id,
        "reasons": {reason.code: reason.value for reason in placement.reasons},
    }


def trust_of(placement: Placement) -> str | None:
    """Return how far it was known what the chosen worker holds; None in the modes that ignore caches."""
    return str(placement.selection.trust) if isinstance(placement, KvPlaced) else None


def hit_rate_of(placement: Placement) -> float | None:
    """Return the share of the prompt's blocks, the unfinished one included, that the chosen worker had on its device as far as
    the router knew; None in the modes that ignore caches."""
    if not isinstance(placement, KvPlaced):
        return None
    state = placement.selection.state
    blocks = -(-state.request.prompt_tokens // state.block_size)
    return placement.selection.overlap.device / blocks if blocks else 0.0


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
    excluded = state.excluded[:MAX_CANDIDATES]
    words = [choice.unit, choice.reason, str(record.trust), *(each["trust"] for each in candidates)]
    words += [name for each in candidates for name, value in each["terms"].items() if value]
    words += [each.reason for each in excluded]
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
            {"worker_id": each.rank.worker_id, "dp_rank": each.rank.dp_rank, "reason": each.reason} for each in excluded
        ],
        "meanings": meanings_of(words),
    }


def _candidate(cost: CandidateCost, record: RankState, match: RankMatch, chosen: WorkerRank) -> ExplainedCandidate:
    overlap = match.overlap
    return {
        "worker": f"{cost.rank.worker_id:x}",
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
    """Describe the decision in two or three sentences, for readers without knowledge of router and policy."""
    chosen = next(each for each in costs if each.rank == choice.rank)
    others = [each for each in costs if each.rank != choice.rank]
    name = f"Chose worker {_name(choice.rank)}"
    held = f"It has {_held_tokens(state, choice.position)} of the prompt's {state.request.prompt_tokens} tokens in its KV cache."
    if state.request.is_pinned:
        return f"{name} because {NAMED}. {held}"
    if not others:
        return f"{name} because no other worker may serve the request. {held}"
    choice_text = f"{name} {reason_of(choice.reason)}: {_amount(choice, choice.cost)}"
    if choice.tied > 1:
        return f"{choice_text}, the same for {choice.tied} workers, of which one was drawn. {held}"
    best = others[0]
    position = next(at for at, each in enumerate(state.ranks) if each.rank == best.rank)
    than = "the next best" if best.total >= choice.cost else "a cheaper one"
    compared = (
        f"{choice_text}. {held} Worker {_name(best.rank)}, {than}, has {_held_tokens(state, position)} of them and would cost "
        f"{_amount(choice, best.total)}"
    )
    differing = _largest_difference(chosen, best)
    return f"{compared}." if differing is None else f"{compared}; the two differ most in `{differing}`."


def _held_tokens(state: KvState, position: int) -> int:
    """Return how many of the prompt's tokens a rank holds, in any tier."""
    overlap = state.matches.get(position, NO_MATCH).overlap
    return min(state.request.prompt_tokens, (overlap.device + overlap.host + overlap.disk) * state.block_size)


def _largest_difference(one: CandidateCost, other: CandidateCost) -> str | None:
    """Return the term that differs most between two candidates; None where only one term or no difference is."""
    terms = {term.name: term.value for term in other.terms}
    gaps = {term.name: abs(terms.get(term.name, 0.0) - term.value) for term in one.terms}
    name = max(gaps, key=gaps.__getitem__, default=None)
    return name if name is not None and len(gaps) > 1 and gaps[name] > 0 else None


def _name(rank: WorkerRank) -> str:
    return f"{rank.worker_id:x}" + (f" rank {rank.dp_rank}" if rank.dp_rank else "")


def _amount(choice: KvChoice, cost: float) -> str:
    return f"{cost:.{_UNIT_DIGITS.get(choice.unit, 1)}f} {choice.unit}"


_UNITS: Final = {
    "ms": "estimated milliseconds that serving there costs, to this request and to those beside it",
    "blocks": "KV blocks: those to be computed for the prompts there, and those that running requests use",
    "requests": "requests that run there",
}

_TRUST: Final[Mapping[str, str]] = {
    Trust.EXACT: "every KV event of the worker was applied: what it holds is known",
    Trust.DEGRADED: "KV events of the worker were lost, and the repair is under way: it may hold something else",
    Trust.PREDICTED: "the worker publishes no KV events: what it holds is guessed from the prompts that it was sent",
    Trust.NONE: "nothing is known of the worker's cache: its load alone counts",
}

# Terms of a cost, by name; those of `time` first, then those of `default` and `two-tier`.
_TERMS: Final = {
    "wait": "until the pass that runs there has ended",
    "prefill": "computing the prompt tokens that the worker does not hold, behind those that wait there",
    "stall": "for the streams and prompts there, which wait while this prompt is computed",
    "future": "for requests that arrive while this prompt is computed",
    "decode": "longer steps, as the worker has one more context to read",
    "tail": "more for each millisecond, the later the first token",
    "eviction": "computing again what has to leave the cache",
    "room": "until running requests have ended and left room for the prompt",
    "preference": "for the taints or the place that the request prefers",
    "prompt": "the prompt, as if nothing of it was held",
    "queued_prefill": "prompts that wait there already",
    "device_overlap": "credit for the prompt's blocks in the worker's GPU memory",
    "host_overlap": "credit for the prompt's blocks in the worker's host memory",
    "disk_overlap": "credit for the prompt's blocks on the worker's disk",
    "shared_cache": "credit for the prompt's blocks in a shared cache",
    "active_blocks": "blocks of the requests that run there",
    "new_blocks": "blocks that the prompt adds to those",
    "active_requests": "requests that run there",
    "limits_and_preference": "the limits at 0, and what the request prefers",
}

_REASONS: Final = {
    "session": "because its session is bound to it",
    "lowest_cost": "because serving there costs least",
    "sampled": "by chance, which prefers cheaper workers (the router's temperature is above 0)",
    "out_of_balance": "because it has the fewest requests, and the workers' numbers of requests are far apart",
    "longest_match": "because it holds the longest part of the prompt",
    "match_too_short": "because it has the fewest requests, and no worker holds enough of the prompt",
}

_EXCLUSIONS: Final = {
    "not_pinned": "the request names another worker",
    "other_rank": "the request names another rank",
    "not_allowed": "not one of the workers that may serve this request",
    "excluded": "the request failed there before",
    "taints": "the worker lacks a taint that the request requires",
    "topology": "the worker is in another place than the request requires",
    "overloaded": "the worker is above a busy threshold",
}

_ALL: Final[Mapping[str, str]] = {**_UNITS, **_TRUST, **_TERMS, **_REASONS, **_EXCLUSIONS}


def meanings_of(words: Iterable[str]) -> dict[str, str]:
    """Return what each of the words means, those that have a meaning here."""
    return {word: _ALL[word] for word in dict.fromkeys(words) if word in _ALL}


def reason_of(code: str) -> str:
    """Return the reason of a choice as the end of a sentence."""
    return _REASONS.get(code, code)
