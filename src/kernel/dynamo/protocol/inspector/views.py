"""The views of the inspector, as its API answers carry them, and as its terminal and its page read them.

Times are milliseconds since the epoch, by the clock of the frontend that answers; durations are seconds. Ids of workers
are strings of hexadecimal digits, as logs write them. None: not known, which a reader shows as `-`.

A snapshot is one picture of the requested views. A watch begins with a snapshot and goes on with patches: `Patch.set` maps the
key of an entry, `VIEW/ID` or the name of a view that has one entry only (`fleet`), to its new value, `Patch.gone` lists
keys whose entries have gone. An entry is sent whole, but for what each token changes of a stream: `Patch.progress` has that
by the id of the stream. Ages are not sent: a reader reckons them from the times, so that an entry that only grows older needs
no patch.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

VIEWS: Final = (
    "fleet", "frontends", "models", "residents", "workers", "streams", "recent", "routing", "caches", "prefixes", "errors",
    "events",
)  # fmt: skip
"""What a snapshot and a watch can contain; the order is that of the page."""

PHASES: Final = (
    "admitted", "preprocess", "route", "queued", "encode", "prefill", "transfer", "decode", "sending", "client slow",
)  # fmt: skip
"""What a request in flight is doing. `queued`: in a queue of the router or of its worker."""


class CountersView(Struct, kw_only=True):
    """Figures of the whole system over the last minute, unless a name defines another span."""

    requests_per_second: float = 0.0
    input_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    running: int = 0  # now
    waiting: int = 0  # now: requests that have had no token yet
    ttft_p50_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    itl_p50_seconds: float | None = None
    itl_p99_seconds: float | None = None
    error_share: float | None = None  # 0 to 1, of the finished requests: the server failed
    refused_share: float | None = None  # 0 to 1, of the finished requests: a client's mistake, or no room
    shed_per_second: float = 0.0
    kv_share: float | None = None  # KV blocks in use of all workers that report them, 0 to 1
    prefix_hit_share: float | None = None  # prompt tokens found in a cache, 0 to 1


class FleetView(Struct, kw_only=True):
    """The whole system on one line, and the last five minutes of it."""

    cluster: str  # the namespace, or what else the operator called it
    started_ms: int  # of the frontend that answers
    frontends: int
    workers: int
    models: int
    now: CountersView
    resident_bytes: int | None = None  # what the models take that are loaded on demand; None: none is
    budget_bytes: int | None = None  # what they may take; None: there is no limit
    history: dict[str, list[float | None]] = {}
    """The last five minutes, an entry each five seconds, the newest last, by the names of `CountersView`."""
    history_seconds: float = 5.0
    read_only: bool = False
    shows_content: bool = False
    role: str = "admin"  # of the viewer: viewer, content, operator or admin
    version: str = ""


class FrontendView(Struct, kw_only=True):
    """One process of a frontend."""

    id: str
    host: str
    pid: int
    started_ms: int
    stage: str  # serving, leaving, draining or stopping
    in_flight: int
    cpu_share: float | None = None  # of one core
    rss_bytes: int | None = None
    loop_lag_seconds: float | None = None
    version: str = ""


class ModelView(Struct, kw_only=True):
    """One model of one namespace."""

    id: str  # NAMESPACE/NAME
    name: str
    namespace: str
    types: list[str]
    is_ready: bool
    why_not: str | None = None  # what is missing, in a sentence; None: nothing is
    workers: dict[str, int] = {}  # by role
    in_flight: int = 0
    waiting: int = 0
    limit: int | None = None  # of requests in flight
    context_length: int | None = None
    block_size: int | None = None
    router_mode: str | None = None
    parent: str | None = None  # of an adapter: its base model
    aliases: list[str] = []
    adapters: list[str] = []


class ResidentView(Struct, kw_only=True):
    """One of many models that are loaded on demand."""

    id: str  # FRONTEND/NAME
    name: str
    state: str  # absent, loading, loaded, idle (loaded, without a request), closing (for others), unloading or failed
    why: str | None = None  # of one that failed, the last line of its engine
    taken_bytes: int | None = None  # None: it is not in memory
    needed_bytes: int  # to load it; an estimate, until it was loaded once
    running: int = 0  # requests
    waiting: int = 0  # requests, for it to be loaded
    is_pinned: bool = False
    presets: list[str] = []
    used_ms: int | None = None  # its last request, or when it was loaded


class ModelsInMemory(Struct, kw_only=True):
    """The models of one frontend that are loaded on demand."""

    used_bytes: int
    budget_bytes: int | None  # None: there is no limit
    models: list[ResidentView]


class WorkerView(Struct, kw_only=True):
    """One worker, as this frontend sees it."""

    id: str
    role: str  # agg, prefill, decode or encode
    models: list[str]
    address: str
    wire: str  # mux, native or nats
    state: str  # starting, ready, draining, quarantined or gone
    note: str = ""  # why it is in that state, and what happens next
    state_until_ms: int | None = None
    since_ms: int | None = None  # when this frontend first saw it
    running: int = 0
    limit: int | None = None
    queued: int | None = None
    queue_age_seconds: float | None = None
    silent_ms: int | None = None  # since when the longest silence of one of its streams lasts
    output_tokens_per_second: float | None = None
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    prefix_hit_share: float | None = None
    adapters: list[str] = []
    version: str | None = None
    card: str | None = None  # checksum


class FallbackView(Struct, kw_only=True):
    """A model that did not serve a request, and the one that was tried next."""

    model: str
    next_model: str
    reason: str  # unavailable, overloaded, timeout, failed or refused
    error: str = ""  # the kind of the error; empty: the model was not there
    at_ms: int
    workers: list[str] = []  # that had the request
    output_tokens: int = 0  # that they had made of an answer, which the client did not get


class StreamView(Struct, kw_only=True):
    """One request in flight."""

    id: str
    client_request_id: str | None = None
    frontend: str  # the process that has it
    key: str | None = None  # the name of the API key, never the key
    model: str | None = None
    served_by: str | None = None  # the model that serves in its place; None: none does
    endpoint: str
    phase: str  # of PHASES
    started_ms: int
    phase_ms: int  # when it entered the phase
    is_streaming: bool = False
    queued_seconds: float = 0.0
    ttft_seconds: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    max_tokens: int | None = None
    tokens_per_second: float | None = None
    last_token_ms: int | None = None
    workers: list[str] = []  # the newest last
    attempt: int = 1
    choices: int = 1
    priority: int = 0
    client_bytes_waiting: int | None = None
    is_stalled: bool = False


class StreamProgress(Struct, kw_only=True):
    """What each token changes of a `StreamView`."""

    output_tokens: int
    tokens_per_second: float | None = None
    last_token_ms: int | None = None


class RecentView(Struct, kw_only=True):
    """One request that has ended."""

    id: str
    client_request_id: str | None = None
    frontend: str
    key: str | None = None
    model: str | None = None
    served_by: str | None = None  # the model that served in its place, or was tried last; None: none was
    endpoint: str
    started_ms: int
    ended_ms: int
    status: int  # of HTTP; 499: the client left
    outcome: str  # ok, failed, cancelled, aborted or shed
    code: str | None = None
    message: str | None = None
    finish_reason: str | None = None
    queued_seconds: float = 0.0
    ttft_seconds: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    workers: list[str] = []
    attempts: int = 1
    has_bundle: bool = False  # there is more to see at /admin/v1/errors/{id}


class CandidateView(Struct, kw_only=True):
    """One worker as a routing decision saw it."""

    worker: str
    rank: int = 0
    overlap_blocks: float | None = None
    prefill_tokens: float | None = None  # that it would have to compute, with those before it
    decode_blocks: float | None = None
    running: int | None = None
    cost: float | None = None  # the lowest wins
    is_chosen: bool = False
    left_out: str | None = None  # why it was not to be had: quarantined, busy, taint, adapter, tried before


class RoutingView(Struct, kw_only=True):
    """One routing decision, in the router's own words."""

    id: str
    request_id: str | None
    model: str
    stage: str  # encode, prefill or decode
    at_ms: int
    policy: str
    decided_by: str  # in words, as "lowest cost"
    prompt_tokens: int | None = None
    block_size: int | None = None
    candidates: list[CandidateView] = []
    candidates_in_all: int = 0  # more than are listed, where there are many


class AttemptView(Struct, kw_only=True):
    """One worker's turn at a request."""

    number: int
    worker: str
    at_ms: int
    outcome: str  # running, ended, or why the next one began
    output_tokens: int = 0


class EventView(Struct, kw_only=True):
    """Something that happened."""

    id: str
    at_ms: int
    kind: str  # worker joined, worker left, worker quarantined, request migrated, card conflict, action, scale
    text: str
    worker: str | None = None
    model: str | None = None
    request_id: str | None = None
    by: str | None = None  # of an action: the name of the key


class RequestDetail(Struct, kw_only=True):
    """One request, in flight or ended, as far as it is still known."""

    stream: StreamView | None = None  # None: it has ended
    recent: RecentView | None = None  # None: it is in flight
    timeline: list[tuple[str, int, int | None]] = []  # phase, its begin and its end in ms; None: it lasts
    routing: list[RoutingView] = []
    fallbacks: list[FallbackView] = []  # the models that were tried before the one that serves
    attempts: list[AttemptView] = []  # of that one
    attempt_limit: int | None = None
    parameters: dict[str, Any] = {}
    token_rates: list[float] = []  # tokens per second of the last minute, an entry each second
    events: list[EventView] = []
    content: dict[str, Any] | None = None  # None: content is not shown


class CacheView(Struct, kw_only=True):
    """The prefix cache of one worker, as the router knows it."""

    id: str  # of the worker
    model: str
    role: str
    block_size: int
    trust: str | None = None  # how far its blocks are known: exact, degraded, predicted or none; None: by no index
    blocks_known: int | None = None  # of it in the index; None: no index keeps them
    blocks_total: int | None = None  # on its device
    index_share: float | None = None  # its part of all blocks in the index, 0 to 1
    tiers: dict[str, int] = {}  # blocks known by tier: device, host_pinned, disk, external
    prompt_blocks_per_minute: float | None = None  # of the requests that ended within the last minute
    hit_blocks_per_minute: float | None = None  # of those, the ones that it had
    hit_share: float | None = None  # the second by the first, 0 to 1
    history: list[float] = []  # hit blocks per minute of five minutes, an entry each five seconds, the newest last
    evicted_blocks_per_minute: float | None = None  # that it removed, by its KV events; None: these are not followed
    gaps: int | None = None  # how often some of its KV events were missing, since this frontend follows them
    resyncs: int | None = None  # how often it had to send its whole state again since then


class PrefixView(Struct, kw_only=True):
    """One prefix that caches hold."""

    id: str  # hash of its last block
    model: str
    blocks: int  # its length
    depth: int  # blocks from the beginning of the prompt to its end
    holders: list[str]
    hits: int | None = None  # of the last 200 prompts that were routed, those that begin with some of it
    parent: str | None = None  # hash of the block before it; None: it begins a prompt


class ErrorGroup(Struct, kw_only=True):
    """Failures that are alike."""

    id: str
    status: int
    code: str | None
    model: str | None
    worker: str | None
    message: str  # with what differs from one failure to the next replaced by a mark
    count: int
    per_minute: float
    first_ms: int
    last_ms: int
    example: str  # id of a request with a bundle


Entry = (
    FrontendView | ModelView | ResidentView | WorkerView | StreamView | RecentView | RoutingView | CacheView | PrefixView | ErrorGroup | EventView
)  # fmt: skip
"""One entry of a view that is a list."""


class SettingView(Struct, kw_only=True):
    """One setting that is in force."""

    name: str
    value: Any  # None: not set; a secret is never shown
    origin: str  # flag, environment, file or default
    help: str = ""


class Picture(Struct, kw_only=True):
    """One picture. A view that was not requested is None."""

    seq: int
    taken_ms: int
    partial: list[str] = []  # members that did not answer in time, and other frontends that could not be reached
    totals: dict[str, int] = {}  # by view, how many entries there are, where only some of them are sent
    fleet: FleetView | None = None
    frontends: list[FrontendView] | None = None
    models: list[ModelView] | None = None
    residents: list[ResidentView] | None = None
    workers: list[WorkerView] | None = None
    streams: list[StreamView] | None = None
    recent: list[RecentView] | None = None
    routing: list[RoutingView] | None = None
    caches: list[CacheView] | None = None
    prefixes: list[PrefixView] | None = None
    errors: list[ErrorGroup] | None = None
    events: list[EventView] | None = None


class Patch(Struct, kw_only=True):
    """What changed since the last picture."""

    seq: int
    taken_ms: int
    set: dict[str, Any] = {}
    gone: list[str] = msgspec.field(default_factory=list, name="del")
    progress: dict[
        str, StreamProgress
    ] = {}  # by the id of a stream that the viewer has, and of which `set` has nothing
    partial: list[str] = []
    totals: dict[str, int] = {}
