"""The metrics of the kv router mode: what was decided, how well, and how much time it took."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dynamo.kv.events import RouterEvent
from dynamo.kv.overlap import Overlap
from dynamo.placement.kv_query import Trust
from dynamo.placement.kv_state import Selection
from dynamo.router.kv.placement import KvWatcher
from dynamo.router.kv.queue_metrics import FAMILIES as QUEUE_FAMILIES
from dynamo.router.kv_events.feed import REFUSALS
from dynamo.runtime.observe.metrics import Family, MetricsRegistry, add_each, observe_each

EVENT_TYPES: Final = ("stored", "removed", "cleared")
EVENT_STATUSES: Final = (
    "ok", "parent_block_not_found", "block_not_found", "invalid_block", "allocation_failed", "capacity_exhausted",
    "indexer_invariant_violation", "ownership_degree_overflow", "unsupported_residency_domain",
)  # fmt: skip

MAX_GONE: Final = 64  # groups without workers whose series stay
RECOUNT_SECONDS: Final = 0.05  # how late the gauge of the ranks may be

_PROCESS: Final = ("dynamo_namespace", "dynamo_component", "router_id")
_RATES: Final = tuple(step / 20 for step in range(21))
_BLOCKS: Final = tuple(0.25 * 2**step for step in range(16))
_TOKENS: Final = (50.0, *(100.0 * 2**step for step in range(12)))
_TTFT: Final = (
    0.001, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1.0, 2.2, 4.7, 10.0, 22.0, 48.0, 100.0, 220.0, 480.0,
)  # fmt: skip
_ITL: Final = (0.0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2.0)
_HASHING_MS: Final = tuple(0.001 * 2**step for step in range(15))
_DECISION_MS: Final = tuple(0.01 * 3**step for step in range(17))

_ROUTER: Final = "dynamo_component_router"
_OVERHEAD: Final = "dynamo_router_overhead"

FAMILIES: Final = (
    Family(f"{_ROUTER}_requests_started_total", "counter", "Requests sent where the kv router chose", _PROCESS),
    Family(f"{_ROUTER}_requests_total", "counter", "Of those, the ones whose stream has ended", _PROCESS),
    Family(
        f"{_ROUTER}_input_sequence_tokens", "histogram", "Prompt tokens", (*_PROCESS, "phase"), buckets=_TOKENS
    ),
    Family(f"{_ROUTER}_output_sequence_tokens", "histogram", "Tokens generated", _PROCESS, buckets=_TOKENS),
    Family(
        f"{_ROUTER}_time_to_first_token_seconds", "histogram", "From the dispatch to the first output", _PROCESS,
        buckets=_TTFT,
    ),
    Family(
        f"{_ROUTER}_inter_token_latency_seconds", "histogram",
        "Mean time between the tokens of a request, observed once for each request", _PROCESS, buckets=_ITL,
    ),
    Family(
        f"{_ROUTER}_kv_hit_rate", "histogram", "Part of the prompt that the chosen worker had cached, as far as known",
        _PROCESS, buckets=_RATES,
    ),
    Family(
        f"{_ROUTER}_non_max_overlap_selections_total", "counter",
        "Requests that went elsewhere than to the longest cached prefix", (*_PROCESS, "worker_type"),
    ),
    Family(
        f"{_ROUTER}_overlap_blocks_lost", "histogram", "How many cached blocks shorter the prefix was there",
        (*_PROCESS, "worker_type"), buckets=_BLOCKS,
    ),
    Family(
        f"{_ROUTER}_kv_best_eligible_cached_prefix_tokens_total", "counter",
        "Cached prompt tokens, had every request gone to the longest cached prefix", _PROCESS,
    ),
    Family(
        f"{_ROUTER}_kv_selected_cached_prefix_tokens_total", "counter",
        "Cached prompt tokens where the requests went", _PROCESS,
    ),
    Family(
        f"{_ROUTER}_ranks", "gauge",
        "Ranks by how far it is known what they hold: `exact`, `degraded` (events were lost), `predicted` or `none`",
        (*_PROCESS, "trust"),
    ),
    Family(
        "dynamo_component_kv_cache_events_applied", "counter", "KV events of workers, by what became of them",
        ("dynamo_namespace", "dynamo_component", "event_type", "status"),
    ),
    Family(
        f"{_ROUTER}_kv_events_refused_total", "counter",
        "KV events, or messages of them, that were not tried: `unreadable` (or too large), `unknown_rank` (no card names "
        "it, and too many wait for a card) or `failed` (a fault of this process, with a traceback in the log)",
        ("dynamo_namespace", "dynamo_component", "reason"),
    ),
    Family(
        f"{_OVERHEAD}_block_hashing_ms", "histogram", "Hashing the blocks of a prompt", ("router_id",),
        buckets=_HASHING_MS,
    ),
    Family(
        f"{_OVERHEAD}_total_ms", "histogram", "Finding the cached prefixes and deciding", ("router_id",),
        buckets=_DECISION_MS,
    ),
)  # fmt: skip

_BY_NAME: Final[Mapping[str, Family]] = {family.name: family for family in FAMILIES}
_OF_DOMAIN: Final = tuple(family.name for family in FAMILIES if set(_PROCESS) <= set(family.labels))
_OF_QUEUE: Final = tuple(family.name for family in QUEUE_FAMILIES)
_OF_EVENTS: Final = tuple(family.name for family in FAMILIES if "router_id" not in family.labels)

Labels = tuple[tuple[str, str], ...]


class KvMetrics(KvWatcher):
    """Counts the decisions of one group of workers."""

    __slots__ = (
        "_counted", "_decision", "_hashing", "_lost", "_non_max", "_prompts", "_ranks", "_recount", "_streams",
    )  # fmt: skip

    def __init__(self, registry: MetricsRegistry, labels: Mapping[str, str], *, role: str) -> None:
        """`labels`: namespace, component and router; `role`: of the workers, such as "decode" or "prefill"."""
        router = {"router_id": labels["router_id"]}
        typed = {**labels, "worker_type": "prefill" if role == "prefill" else "decode"}
        self._prompts = (  # of each decision: the tokens, and which share of them was cached
            _family("input_sequence_tokens").histogram(registry, {**labels, "phase": role}),
            _family("kv_hit_rate").histogram(registry, labels),
        )
        self._non_max = _family("non_max_overlap_selections_total").counter(registry, typed)
        self._lost = _family("overlap_blocks_lost").histogram(registry, typed)
        self._counted = (  # decisions, cached tokens at best, and where the requests went
            _family("requests_started_total").counter(registry, labels),
            _family("kv_best_eligible_cached_prefix_tokens_total").counter(registry, labels),
            _family("kv_selected_cached_prefix_tokens_total").counter(registry, labels),
        )
        self._hashing = _BY_NAME[f"{_OVERHEAD}_block_hashing_ms"].histogram(registry, router)
        self._decision = _BY_NAME[f"{_OVERHEAD}_total_ms"].histogram(registry, router)
        ranks = _family("ranks").gauges(registry, labels)
        self._ranks = {trust: ranks.labels(str(trust)) for trust in Trust}
        self._recount: asyncio.TimerHandle | None = None
        self._streams = (
            _family("time_to_first_token_seconds").histogram(registry, labels),
            _family("inter_token_latency_seconds").histogram(registry, labels),
            _family("output_sequence_tokens").histogram(registry, labels),
            _family("requests_total").counter(registry, labels),
        )

    def hashed(self, seconds: float) -> None:
        """Take how long it took to hash a prompt."""
        self._hashing.observe(seconds * 1000)

    def selected(self, seconds: float) -> None:
        """Take how long a decision took."""
        self._decision.observe(seconds * 1000)

    def booked(self, selection: Selection) -> None:
        """Take a request that is sent to the worker of the decision."""
        tokens, size = selection.lookup.prompt_tokens, selection.state.block_size
        observe_each(self._prompts, (tokens, selection.cached_tokens / tokens if tokens else 0.0))
        held = longest = 0
        if matches := selection.state.matches:
            held = _depth(selection.overlap)
            longest = max([_depth(match.overlap) for match in matches.values()])
        add_each(self._counted, (1, min(tokens, longest * size), min(tokens, held * size)))
        if held < longest:
            self._non_max.inc()
            self._lost.observe(longest - held)

    def answered(self, seconds: float) -> None:
        """Take how long the first output of a request took."""
        self._streams[0].observe(seconds)

    def ended(self, tokens: int, seconds: float) -> None:
        """Take the end of a stream that brought `tokens`, in `seconds` since the first of them."""
        _, inter_token, output, requests = self._streams
        requests.inc()
        output.observe(tokens)
        if tokens > 1:
            inter_token.observe(seconds / (tokens - 1))

    def ranks_changed(self, read: Callable[[], Iterable[Trust]]) -> None:
        """Count the ranks by the trust in what they hold, in a moment: many change together. `read` returns it then."""
        if self._recount is None:
            self._recount = asyncio.get_running_loop().call_later(RECOUNT_SECONDS, self._count_ranks, read)

    def _count_ranks(self, read: Callable[[], Iterable[Trust]]) -> None:
        self._recount = None
        counts = Tally(read())
        for trust, gauge in self._ranks.items():
            gauge.set(counts[trust])


class SeriesGroups:
    """The groups of workers that have series here. Those of the last `MAX_GONE` groups that have gone stay, for their counters go
    on when the workers come back; the series of older ones are no longer exposed.
    """

    __slots__ = ("_gone", "_users", "registry")

    def __init__(self, registry: MetricsRegistry) -> None:
        self.registry = registry
        self._users: Tally[Labels] = Tally()
        self._gone: dict[Labels, None] = {}  # the oldest first

    def enter(self, labels: Mapping[str, str]) -> Callable[[], None]:
        """Keep the series with these labels until what is returned is called, once."""
        group = tuple(labels.items())
        self._gone.pop(group, None)
        self._users[group] += 1
        return lambda: self._leave(group)

    def _leave(self, group: Labels) -> None:
        self._users[group] -= 1
        if self._users[group]:
            return
        del self._users[group]
        self._gone[group] = None
        if len(self._gone) > MAX_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self.registry.forget(_names_of(oldest), oldest)


def _names_of(group: Labels) -> Iterable[str]:
    """Return the metrics of a group: of a domain, of the queue before a pool, or of the events of an endpoint."""
    labels = dict(group)
    if "router_id" in labels:
        return _OF_DOMAIN
    return _OF_QUEUE if "worker_type" in labels else _OF_EVENTS


class EventCounters:
    """Counts the KV events of one component by what became of them."""

    __slots__ = ("_counters", "_other", "_refused")

    def __init__(self, registry: MetricsRegistry, labels: Mapping[str, str]) -> None:
        family = _BY_NAME["dynamo_component_kv_cache_events_applied"].counters(registry, labels)
        self._counters = {
            (kind, status): family.labels(kind, status) for kind in EVENT_TYPES for status in EVENT_STATUSES
        }
        self._other = {kind: self._counters[kind, "invalid_block"] for kind in EVENT_TYPES}
        refused = _family("kv_events_refused_total").counters(registry, labels)
        self._refused = {reason: refused.labels(reason) for reason in REFUSALS}

    def count(self, event: RouterEvent, status: str) -> None:
        """Count one event."""
        data = event.event.data
        kind = "cleared" if data == "cleared" else "removed" if data.removed is not None else "stored"
        self._counters.get((kind, status), self._other[kind]).inc()

    def refused(self, reason: str) -> None:
        """Count what was not tried, by one of `REFUSALS`."""
        self._refused[reason].inc()


def _family(short: str) -> Family:
    return _BY_NAME[f"{_ROUTER}_{short}"]


def _depth(overlap: Overlap) -> int:
    return overlap.device + overlap.host + overlap.disk
