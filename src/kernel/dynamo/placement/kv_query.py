"""The query of a KV-aware choice, the facts of each rank, and the filters that come before every cost.

The filters are pure functions: ranks and a query in, the eligible ranks out, or the error with the reason why there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from dynamo.errors import InvalidArgument, Overloaded, Unknown, WorkerUnavailable
from dynamo.kv.media_routing import RoutedPrompt, routed_prompt
from dynamo.kv.overlap import WorkerRank

# No cost becomes infinite with it: that times the tokens of all prompts of a rank is far from the end of a float.
MAX_WEIGHT: Final = 1_000_000.0
# What a cached block off the device counts beside one on it, unless a setting gives another weight: the native defaults.
HOST_HIT_WEIGHT: Final = 0.75
DISK_HIT_WEIGHT: Final = 0.25
MAX_PRIORITY: Final = 1e15  # seconds of waiting
MAX_OUTPUT: Final = 2**31  # tokens; a request that announces more counts as one of so many


class NoEndpoints(WorkerUnavailable):
    """No rank is known, or the request has failed on every one of them."""


class AllEligibleWorkersOverloaded(Overloaded):
    """Every rank that may serve the request is over a busy threshold."""


class PinnedWorkerOverloaded(Overloaded):
    """The worker that the request names is over a busy threshold."""


class PinnedWorkerNotAllowed(InvalidArgument):
    """The worker that the request names is not among the workers that the request allows."""


class PinnedRankOutOfRange(Unknown):
    """No worker has the data-parallel rank that the request names."""


class AllEligibleWorkersFiltered(Unknown):
    """No rank has the taints or the topology that the request requires."""


class Trust(StrEnum):
    """How far the index of one rank's blocks can be believed."""

    EXACT = "exact"  # every event of the rank was applied
    DEGRADED = "degraded"  # events were lost or dropped, and the repair is not complete
    PREDICTED = "predicted"  # no events: only what was routed there
    NONE = "none"  # nothing is known


class FetchTerms(msgspec.Struct, frozen=True):
    """What a card declares of fetches of blocks from one worker to another."""

    worker_type: str  # aggregated, prefill or decode: only workers of one type fetch from each other
    control_endpoint: str | None = None  # where the blocks of the rank are fetched; None: nowhere
    takes_hints: bool = False  # its engine can fetch


class RankInfo(msgspec.Struct, frozen=True):
    """One rank by its model card and the load reports. Everything may be unknown."""

    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    taints: frozenset[str] = frozenset()
    topology: Mapping[str, str] = {}  # domain to value, such as {"zone": "a"}
    is_busy: bool = False  # over a busy threshold
    trust: Trust = Trust.EXACT
    fetches: FetchTerms | None = None  # None: the worker takes no part in them


class RequestOrigin(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What policies of users know of a request, apart from its prompt. None: not known."""

    session_id: str | None = None
    tenant: str | None = None  # owner of its API key
    lora_name: str | None = None
    priority: float = 0.0
    suggested_worker_id: int | None = None  # by the policy itself, when it classified the request


class FirstTokenAim(msgspec.Struct, gc=False):
    """When the first token of a request should be there. The queries of all its attempts at workers share one."""

    target_ms: float | None = None  # of the request itself; None: that of its policy class, if that has one
    due: float | None = None  # loop time; set by the queue that the request comes to
    reached: Callable[[float], None] | None = None  # takes the loop time of the first token


class KvOverrides(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """What one request changes in the settings of the router (`router_config_override`). None keeps a setting."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    overlap_score_weight: float | None = None  # deprecated name of prefill_load_scale; 0 also sets the credit to 0
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


def read_overrides(given: object) -> KvOverrides | None:
    """Return what a request changes in the router's settings. Raises InvalidArgument that names the member."""
    if not given:
        return None
    try:
        found = msgspec.convert(given, KvOverrides)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidArgument(f"router_config_override: {error}") from error
    for name in KvOverrides.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, float):
            check_number(f"router_config_override.{name}", value)
    return found


def check_number(name: str, value: float, *, lowest: float = 0.0, highest: float = MAX_WEIGHT) -> None:
    """Check a number of a request. Raises InvalidArgument with its `name` where it is out of bounds, infinite or NaN."""
    if not lowest <= value <= highest:  # NaN is neither
        raise InvalidArgument(f"{name} must be a number between {lowest:g} and {highest:g}, got {value}")


def clamp_output(tokens: int | None) -> int | None:
    """Return the length of the answer that a request expects, as a number that costs can be computed with."""
    return None if tokens is None else max(0, min(tokens, MAX_OUTPUT))


def read_priority(given: float | None) -> float:
    """Return a request's priority. Raises InvalidArgument for one that has no place in an order, such as NaN."""
    if given is None:
        return 0
    check_number("routing.priority", given, lowest=-MAX_PRIORITY, highest=MAX_PRIORITY)
    return given


def read_target(given: float | None) -> FirstTokenAim:
    """Return the target of a request for its first token. Raises InvalidArgument for one that cannot be."""
    if given is not None:
        check_number("routing.slo_ttft_ms", given, lowest=1.0, highest=MAX_PRIORITY)
    return FirstTokenAim(given)


def read_preferred_taints(given: Mapping[str, float] | None) -> Mapping[str, float]:
    """Return the weights of the taints that a request prefers. Raises InvalidArgument that names one that cannot be."""
    for taint, weight in (given or {}).items():
        check_number(f"routing_constraints.preferred_taints.{taint}", weight, lowest=-MAX_WEIGHT)
    return given or {}


def media_prompt(info: object, token_ids: Sequence[int]) -> RoutedPrompt:
    """Return the prompt with its media as it is routed. Raises InvalidArgument that names the member that is wrong."""
    try:
        return routed_prompt(info, token_ids)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


class KvQuery(msgspec.Struct):
    """One request as the router sees it.

    The prompt is `token_ids`, or `sequence` (chained sequence hashes of its complete blocks) with `prompt_tokens`.
    """

    token_ids: Sequence[int] = ()
    sequence: Sequence[int] | None = None  # known already: nothing is hashed
    prompt_tokens: int | None = None  # None: the number of token ids
    tracking_sequence: Sequence[int] | None = None  # names of the same blocks in the account of loads; None: `sequence`
    lora_name: str | None = None
    cache_salt: str | None = None
    mm_hashes: Mapping[int, Sequence[int]] | None = None  # media objects by block number
    shared_hits: tuple[tuple[int, int], ...] = ()  # ranges [start, end) of blocks that a shared cache holds
    priority: float = 0  # in seconds of waiting, in a queue of first come, first served
    strict_priority: int = 0  # a higher one always goes first
    policy_class: str | None = None
    queued_seconds: float = 0.0  # how long it has waited for its turn
    pinned_worker_id: int | None = None
    pinned_dp_rank: int | None = None
    allowed: Collection[int] | None = None  # worker ids, never changed in place; None: all
    excluded: Collection[WorkerRank | int] = ()  # ranks or workers that the request has failed on
    required_taints: Collection[str] = ()
    preferred_taints: Mapping[str, float] = {}  # taint to weight
    required_topology: Mapping[str, str] = {}
    preferred_topology: Mapping[str, tuple[str, float]] = {}  # domain to (value, weight)
    expected_output: int | None = None  # tokens
    overrides: KvOverrides | None = None
    origin: RequestOrigin | None = None  # None: no policy reads it
    tenant: str | None = None  # owner of its API key: the tenants of a queue with `dlpm`
    aim: FirstTokenAim = msgspec.field(default_factory=FirstTokenAim)
    defer_seconds: float = 0.0  # how long a policy holds it back before a worker is chosen


class RankExclusion(msgspec.Struct, frozen=True, gc=False):
    """One rank that no cost was computed for, and the filter that excluded it."""

    rank: WorkerRank
    reason: str  # "not_allowed", "excluded", "not_pinned", "other_rank", "taints", "topology", "overloaded"


_NOT_FOUND: Final = "Invalid request"  # the native text for an unknown worker id


def is_unconstrained(query: KvQuery) -> bool:
    """Return whether the query excludes no rank by itself."""
    return query.allowed is None and not names_ranks(query)


def names_ranks(query: KvQuery) -> bool:
    """Return whether the query excludes ranks by more than the workers that are allowed."""
    return bool(
        query.excluded
        or query.required_taints
        or query.required_topology
        or query.pinned_worker_id is not None
        or query.pinned_dp_rank is not None
    )


def eligible_ranks(
    ranks: Mapping[WorkerRank, RankInfo], query: KvQuery
) -> tuple[list[WorkerRank], tuple[RankExclusion, ...]]:
    """Return the ranks that may serve the query, at least one, and the excluded ranks with the reason for each.

    Raises:
        NoEndpoints: no rank is known, or the request has failed on all of them.
        InvalidArgument: the pinned worker does not exist.
        PinnedWorkerNotAllowed: the pinned worker is not among the allowed workers.
        PinnedRankOutOfRange: no eligible worker has the pinned rank.
        AllEligibleWorkersFiltered: taints, topology or the allowed workers leave none.
        PinnedWorkerOverloaded, AllEligibleWorkersOverloaded: every rank that is left is over a busy threshold.
    """
    if not ranks:
        raise NoEndpoints("No endpoints are available")
    _check_pin(ranks, query)
    left: list[WorkerRank] = []
    excluded: list[RankExclusion] = []
    for rank, info in ranks.items():
        reason = exclusion_of(rank, info, query)
        if reason is None:
            left.append(rank)
        else:
            excluded.append(RankExclusion(rank, reason))
    if not left:
        raise _nothing_left(query, {each.reason for each in excluded})
    return left, tuple(excluded)


def preferred_weight(info: RankInfo, query: KvQuery) -> float:
    """Return the sum of the preferred weights that a rank matches, by taint and by topology."""
    total = 0.0
    for taint, weight in query.preferred_taints.items():
        if taint in info.taints:
            total += weight
    for domain, (value, weight) in query.preferred_topology.items():
        if info.topology.get(domain) == value:
            total += weight
    return total


def _check_pin(ranks: Mapping[WorkerRank, RankInfo], query: KvQuery) -> None:
    worker_id, dp_rank = query.pinned_worker_id, query.pinned_dp_rank
    if worker_id is not None:
        own = [rank for rank in ranks if rank.worker_id == worker_id]
        if not own:
            raise InvalidArgument(_NOT_FOUND)
        if query.allowed is not None and worker_id not in query.allowed:
            raise PinnedWorkerNotAllowed(f"worker {worker_id} is not among the allowed workers")
        if dp_rank is not None and WorkerRank(worker_id, dp_rank) not in ranks:
            raise PinnedRankOutOfRange(f"worker {worker_id} has no rank {dp_rank}")
    elif dp_rank is not None and all(rank.dp_rank != dp_rank for rank in ranks):
        raise PinnedRankOutOfRange(f"no worker has a rank {dp_rank}")


def exclusion_of(rank: WorkerRank, info: RankInfo, query: KvQuery) -> str | None:
    """Find the first filter that excludes a rank. None: the rank is eligible."""
    worker_id = rank.worker_id
    if query.pinned_worker_id is not None and worker_id != query.pinned_worker_id:
        return "not_pinned"
    if query.pinned_dp_rank is not None and rank.dp_rank != query.pinned_dp_rank:
        return "other_rank"
    if query.allowed is not None and worker_id not in query.allowed:
        return "not_allowed"
    if query.excluded and (rank in query.excluded or worker_id in query.excluded):
        return "excluded"
    if query.required_taints and not info.taints.issuperset(query.required_taints):
        return "taints"
    if any(info.topology.get(domain) != value for domain, value in query.required_topology.items()):
        return "topology"
    return "overloaded" if info.is_busy else None


def _nothing_left(query: KvQuery, reasons: set[str]) -> Exception:
    """Return the error of a query for which no rank is left."""
    if "overloaded" in reasons:  # the last filter: those ranks passed all others
        return PinnedWorkerOverloaded() if query.pinned_worker_id is not None else AllEligibleWorkersOverloaded()
    if reasons & {"taints", "topology"}:
        return AllEligibleWorkersFiltered("no eligible worker has the required taints and topology")
    if "excluded" in reasons:
        return NoEndpoints("the request has failed on every endpoint")
    if reasons == {"other_rank"} or (query.pinned_dp_rank is not None and "not_allowed" not in reasons):
        return PinnedRankOutOfRange(f"no eligible worker has a rank {query.pinned_dp_rank}")
    return AllEligibleWorkersFiltered("no worker is among the allowed workers")
