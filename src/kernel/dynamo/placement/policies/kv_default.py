"""The native cost of a placement, in blocks: what the rank still has to compute for this prompt and those before it, less
what it holds of the prompt, and the blocks of its active requests.

Deviations from the native decisions show in ties only: the native system draws its own chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from dynamo.placement.gaps import Gaps
from dynamo.placement.kv_query import DISK_HIT_WEIGHT, HOST_HIT_WEIGHT, KvOverrides
from dynamo.placement.kv_state import (
    NO_MATCH,
    CandidateCost,
    CostTerm,
    KvChoice,
    KvState,
    RankMatch,
    RankState,
    SeenRecords,
)
from dynamo.placement.policies.kv_draw import pick_lowest, pick_sampled
from dynamo.placement.policies.kv_parameters import read_parameters
from dynamo.placement.policies.kv_time_arrays import ARRAYS_FROM, lowest_of, numpy, reordered

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

TYPE_NAME: Final = "dynamo-default-cost-fn"

Weight = Annotated[float, msgspec.Meta(ge=0)]


class DefaultCostParameters(msgspec.Struct, frozen=True, gc=False):
    """The weights of the cost."""

    overlap_score_credit: Weight = 1.0  # of a block that the device holds
    overlap_score_credit_decay: Weight = 0.0  # less credit on ranks that have more to compute than others
    prefill_load_scale: Weight = 1.0
    decode_active_request_weight: Weight = 0.0  # blocks for each active request
    host_cache_hit_weight: Weight = HOST_HIT_WEIGHT
    disk_cache_hit_weight: Weight = DISK_HIT_WEIGHT
    shared_cache_multiplier: Weight = 0.0
    router_temperature: Weight = 0.0  # 0: the lowest cost; above: sampled by softmax


class _Columns:
    """What the common cost reads of every rank, as arrays: kept between decisions, and changed where a rank has changed."""

    __slots__ = ("_seen", "_table", "np")

    def __init__(self, np: ModuleType) -> None:
        self.np, self._seen = np, SeenRecords()
        self._table: NDArray[float64] = np.empty((3, 0))

    def take(self, ranks: Sequence[RankState]) -> tuple[NDArray[float64], Gaps]:
        """Return the tokens to be computed, the blocks and the requests of each rank as it is now, and which ranks are not to be chosen."""
        records, gaps, (gone, new, changed) = self._seen.take(ranks)
        self._table = reordered(self.np, self._table, gone, new)
        pending, decode, requests = self._table
        for at in (*new, *changed):  # one figure after the other: a column at once takes twice as long
            rank = records[at]
            pending[at] = rank.prefill_tokens if rank.has_load else 0
            decode[at], requests[at] = rank.decode_blocks, rank.requests
        return self._table, gaps


class DefaultCost:
    """The policy `default`."""

    __slots__ = ("_columns", "_parameters")

    name: Final = "default"
    reads_timing: Final = False

    def __init__(self, parameters: DefaultCostParameters | None = None) -> None:
        self._parameters = parameters or DefaultCostParameters()
        self._columns: _Columns | None = None  # of very many ranks

    @classmethod
    def of(cls, given: Mapping[str, object]) -> DefaultCost:
        """Make the policy from named parameters. Raises InvalidArgument for one that does not exist or cannot be."""
        return cls(read_parameters(TYPE_NAME, DefaultCostParameters, given))

    @property
    def parameters(self) -> DefaultCostParameters:
        return self._parameters

    def choose(self, state: KvState, draw: float, *, with_terms: bool = False) -> KvChoice:
        """Choose the rank of the lowest cost, or sample one."""
        overrides = state.request.overrides
        weights = self._parameters if overrides is None else _overridden(self._parameters, overrides)
        cost = _Cost(state, weights)
        if len(state.ranks) >= ARRAYS_FROM and cost.is_common and not (weights.router_temperature or with_terms):
            if self._columns is None and (np := numpy()) is not None:
                self._columns = _Columns(np)
            if (columns := self._columns) is not None:
                position, lowest, tied = lowest_of(cost.of_columns(columns), draw)
                return KvChoice(self.name, "blocks", state.ranks[position].rank, position, lowest, tied, draw)
        costs = cost.totals()
        if weights.router_temperature > 0.0:
            position, tied = pick_sampled(costs, weights.router_temperature, draw)
            reason = "sampled"
        else:
            position, tied = pick_lowest(costs, draw)
            reason = "lowest_cost"
        rank, described = state.ranks[position].rank, cost.described(costs) if with_terms else ()
        return KvChoice(self.name, "blocks", rank, position, costs[position], tied, draw, reason, described)


def _overridden(weights: DefaultCostParameters, overrides: KvOverrides) -> DefaultCostParameters:
    """Return the weights with what the request sets for itself."""
    credit, scale = weights.overlap_score_credit, weights.prefill_load_scale
    if overrides.overlap_score_weight is not None:
        scale = overrides.overlap_score_weight
        if scale == 0.0:
            credit = 0.0
    if overrides.prefill_load_scale is not None:
        scale = overrides.prefill_load_scale
    if overrides.overlap_score_credit is not None:
        credit = overrides.overlap_score_credit
    temperature, shared = overrides.router_temperature, overrides.shared_cache_multiplier
    return msgspec.structs.replace(
        weights,
        overlap_score_credit=credit,
        prefill_load_scale=scale,
        router_temperature=weights.router_temperature if temperature is None else temperature,
        shared_cache_multiplier=weights.shared_cache_multiplier if shared is None else shared,
    )


class _Cost:
    """The cost of every rank of one state."""

    __slots__ = ("_least_prefill", "_prompt", "_request_blocks", "_state", "_weights")

    def __init__(self, state: KvState, weights: DefaultCostParameters) -> None:
        self._state, self._weights = state, weights
        tokens = state.request.prompt_tokens
        self._prompt = tokens / state.block_size
        self._request_blocks = max(1, -(-tokens // state.block_size))
        self._least_prefill = (
            min(rank.prefill_tokens for rank in state.ranks) if weights.overlap_score_credit_decay else 0
        )

    @property
    def is_common(self) -> bool:
        """Whether the cost is the sum that one loop can compute for all ranks."""
        request = self._state.request
        is_other = not request.tracks_prefill or request.shared_hits or request.has_preferences
        return not (is_other or self._weights.overlap_score_credit_decay)

    def of_columns(self, columns: _Columns) -> NDArray[float64]:
        """Return the same as `totals` in the common case, for all ranks at once."""
        request, weights = self._state.request, self._weights
        (pending, decode, requests), gaps = columns.take(self._state.ranks)
        costs: NDArray[float64] = pending + request.prompt_tokens
        costs /= self._state.block_size
        if weights.prefill_load_scale != 1.0:
            costs *= weights.prefill_load_scale
        costs += decode + request.complete_blocks
        if weights.decode_active_request_weight:
            costs += weights.decode_active_request_weight * requests
        if gaps.at:
            costs = columns.np.delete(costs, gaps.at)
        self._match(costs)
        return costs

    def totals(self) -> list[float]:
        """Return the cost of each rank, in the order of the state."""
        state, weights = self._state, self._weights
        request, block_size = state.request, state.block_size
        tokens, complete = request.prompt_tokens, request.complete_blocks
        scale, request_weight = weights.prefill_load_scale, weights.decode_active_request_weight
        if not self.is_common:
            return [self._total(rank, state.matches.get(at, NO_MATCH)) for at, rank in enumerate(state.ranks)]
        # The common case, in one loop: the same sums as in `_total`, which a test compares.
        costs = [
            scale * (((rank.prefill_tokens if rank.has_load else 0) + tokens) / block_size)
            + (rank.decode_blocks + complete)
            + request_weight * rank.requests
            for rank in state.ranks
        ]
        self._match(costs)
        return costs

    def _match(self, costs: list[float] | NDArray[float64]) -> None:
        """Compute the cost of the ranks that have some of the prompt, in the common case."""
        state, weights = self._state, self._weights
        tokens, complete, block_size = state.request.prompt_tokens, state.request.complete_blocks, state.block_size
        scale, request_weight = weights.prefill_load_scale, weights.decode_active_request_weight
        device, host, disk = weights.overlap_score_credit, weights.host_cache_hit_weight, weights.disk_cache_hit_weight
        for at, match in state.matches.items():
            rank, overlap = state.ranks[at], match.overlap
            raw = ((rank.prefill_tokens if rank.has_load else 0) + tokens) / block_size
            raw = max(0.0, raw - (device * overlap.device + host * overlap.host + disk * overlap.disk))
            decode = rank.decode_blocks + complete - match.active_blocks
            costs[at] = scale * raw + decode + request_weight * rank.requests

    def _total(self, rank: RankState, match: RankMatch) -> float:
        request, weights = self._state.request, self._weights
        credit = self._credit(rank, match)
        decode = rank.decode_blocks + (request.complete_blocks - match.active_blocks)
        requests = weights.decode_active_request_weight * rank.requests
        if not request.tracks_prefill and credit > 0.0:  # of any worker: seen in 1.6.1 with workers that do both
            total = max(0.0, decode - credit) + requests
        else:
            total = weights.prefill_load_scale * max(0.0, self._raw(rank) - credit) + decode + requests
        return total * self._preference(match)

    def _raw(self, rank: RankState) -> float:
        """Return the blocks of everything that the rank has to compute and of the whole prompt."""
        if not rank.has_load:
            return self._prompt
        if not self._state.request.tracks_prefill:
            return 0.0
        return (rank.prefill_tokens + self._state.request.prompt_tokens) / self._state.block_size

    def _credit(self, rank: RankState, match: RankMatch) -> float:
        weights, overlap = self._weights, match.overlap
        return (
            weights.overlap_score_credit * self._decay(rank) * overlap.device
            + weights.host_cache_hit_weight * overlap.host
            + weights.disk_cache_hit_weight * overlap.disk
            + weights.shared_cache_multiplier * self._shared(match)
        )

    def _decay(self, rank: RankState) -> float:
        decay = self._weights.overlap_score_credit_decay
        if not decay:
            return 1.0
        ahead = (rank.prefill_tokens - self._least_prefill) / self._state.block_size
        return 1.0 / (1.0 + decay * ahead / self._request_blocks)

    def _shared(self, match: RankMatch) -> int:
        """Return the blocks that a shared cache holds beyond those of the rank's own device."""
        device = match.overlap.device
        return sum(max(0, end - max(start, device)) for start, end in self._state.request.shared_hits)

    def _preference(self, match: RankMatch) -> float:
        request = self._state.request
        if request.is_pinned or not request.has_preferences:
            return 1.0
        return math.exp(-math.tanh(match.preferred_weight))

    def described(self, costs: Sequence[float]) -> tuple[CandidateCost, ...]:
        """Return every rank with the parts of its cost."""
        matches, found = self._state.matches, enumerate(zip(self._state.ranks, costs, strict=True))
        return tuple(
            CandidateCost(rank.rank, total, rank.trust, matches.get(at, NO_MATCH).overlap.device, self.terms(at, total))
            for at, (rank, total) in found
        )

    def terms(self, at: int, total: float) -> tuple[CostTerm, ...]:
        """Return the parts of the cost of one rank; they add up to `total`."""
        state, weights = self._state, self._weights
        rank, match = state.ranks[at], state.matches.get(at, NO_MATCH)
        scale, overlap = weights.prefill_load_scale, match.overlap
        raw = self._raw(rank)
        queued = raw - self._prompt if rank.has_load and state.request.tracks_prefill else 0.0
        parts = [
            ("prompt", scale * (raw - queued)),
            ("queued_prefill", scale * queued),
            ("device_overlap", -scale * weights.overlap_score_credit * self._decay(rank) * overlap.device),
            ("host_overlap", -scale * weights.host_cache_hit_weight * overlap.host),
            ("disk_overlap", -scale * weights.disk_cache_hit_weight * overlap.disk),
            ("shared_cache", -scale * weights.shared_cache_multiplier * self._shared(match)),
            ("active_blocks", rank.decode_blocks),
            ("new_blocks", float(state.request.complete_blocks - match.active_blocks)),
            ("active_requests", weights.decode_active_request_weight * rank.requests),
        ]
        # What the limits at 0 and the preference change; with neither, only the last bits of the sum.
        parts.append(("limits_and_preference", total - sum(value for _, value in parts)))
        return tuple(CostTerm(name, value) for name, value in parts)
