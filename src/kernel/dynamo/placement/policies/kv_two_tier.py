"""Two rules in turn: balance while the request counts are far apart, else the longest match if it is long enough.

The native defaults of the three thresholds are not published; those below are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from dynamo.placement.candidates import MOST_LOAD
from dynamo.placement.kv_state import NO_MATCH, CandidateCost, CostTerm, KvChoice, KvState, SeenRecords
from dynamo.placement.policies.kv_draw import pick_lowest
from dynamo.placement.policies.kv_parameters import read_parameters
from dynamo.placement.policies.least_loaded import highest_load, lowest_load, nth

TYPE_NAME: Final = "dynamo-two-tier-cost-fn"


class TwoTierParameters(msgspec.Struct, frozen=True, gc=False):
    """When to balance, and which match is long enough."""

    cache_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5  # share of the prompt
    balance_abs_threshold: Annotated[float, msgspec.Meta(ge=0)] = 32.0  # requests
    balance_rel_threshold: Annotated[float, msgspec.Meta(ge=1)] = 1.5


class TwoTierCost:
    """The policy `dynamo-two-tier-cost-fn`."""

    __slots__ = ("_counts", "_parameters", "_seen")

    name: Final = "two-tier"
    reads_timing: Final = False

    def __init__(self, parameters: TwoTierParameters | None = None) -> None:
        self._parameters = parameters or TwoTierParameters()
        self._seen = SeenRecords()
        self._counts = bytearray()  # the requests of each rank, `MOST_LOAD` at most

    @classmethod
    def of(cls, given: Mapping[str, object]) -> TwoTierCost:
        """Make the policy from named parameters. Raises InvalidArgument for one that does not exist or cannot be."""
        return cls(read_parameters(TYPE_NAME, TwoTierParameters, given))

    @property
    def parameters(self) -> TwoTierParameters:
        return self._parameters

    def choose(self, state: KvState, draw: float, *, with_terms: bool = False) -> KvChoice:
        """Choose the rank with the fewest requests, or the one with the longest match."""
        loads = self._current_counts(state)
        counts: Sequence[int] = loads
        fewest, most = lowest_load(loads), highest_load(loads)
        if most == MOST_LOAD:
            counts = [rank.requests for rank in state.ranks]
            fewest, most = min(counts), max(counts)
        reason, candidates = self._candidates(state, fewest, most)
        if candidates:
            picked, tied = pick_lowest([counts[at] for at in candidates], draw)
            position = candidates[picked]
        else:
            tied = counts.count(fewest)
            position = nth(counts, fewest, min(int(draw * tied), tied - 1))
        rank, cost, described = (
            state.ranks[position].rank,
            float(counts[position]),
            _described(state) if with_terms else (),
        )
        return KvChoice(self.name, "requests", rank, position, cost, tied, draw, reason, described)

    def _current_counts(self, state: KvState) -> bytearray:
        """Return the requests of each rank of a state."""
        records, gaps, (gone, new, changed) = self._seen.take(state.ranks)
        counts = self._counts
        for at in reversed(gone):
            del counts[at]
        for at in new:
            counts.insert(at, 0)
        for at in (*new, *changed):
            counts[at] = min(MOST_LOAD, records[at].requests)
        return gaps.left(counts) if gaps.at else counts

    def _candidates(self, state: KvState, fewest: int, most: int) -> tuple[str, list[int]]:
        """Return the rule that applies, and the positions among which the fewest requests decide; none: among all."""
        parameters = self._parameters
        if most - fewest > parameters.balance_abs_threshold and most > parameters.balance_rel_threshold * fewest:
            return "out_of_balance", []
        depths = {at: match.overlap.device for at, match in state.matches.items() if match.overlap.device}
        longest = max(depths.values(), default=0)
        share = min(1.0, longest * state.block_size / max(1, state.request.prompt_tokens))
        if longest and share >= parameters.cache_threshold:
            return "longest_match", sorted(at for at, depth in depths.items() if depth == longest)
        return "match_too_short", []


def _described(state: KvState) -> tuple[CandidateCost, ...]:
    """Return every rank with its requests and what it holds of the prompt."""
    return tuple(
        CandidateCost(
            rank.rank,
            float(rank.requests),
            rank.trust,
            state.matches.get(at, NO_MATCH).overlap.device,
            (CostTerm("active_requests", float(rank.requests)),),
        )
        for at, rank in enumerate(state.ranks)
    )
