"""The tables of the inspector: for each view its columns, and how each is read from an entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from dynamo.cli.inspect.figures import (
    UNKNOWN,
    age,
    bar,
    bytes_of,
    clock,
    count,
    exact,
    per_second,
    percent,
    short,
    sparkline,
)
from dynamo.cli.inspect.lines import Cell, Column, TableForm, Tone
from dynamo.protocol.inspector.views import ErrorGroup, ModelView, RecentView, RoutingView, StreamView, WorkerView

_STATE_TONES: Final[Mapping[str, Tone]] = MappingProxyType(
    {
        "ready": Tone.GOOD, "serving": Tone.GOOD, "ok": Tone.GOOD,
        "starting": Tone.WARN, "draining": Tone.WARN, "leaving": Tone.WARN, "stopping": Tone.WARN,
        "client slow": Tone.WARN, "queued": Tone.WARN, "cancelled": Tone.WARN, "shed": Tone.WARN,
        "quarantined": Tone.BAD, "gone": Tone.BAD, "failed": Tone.BAD, "aborted": Tone.BAD,
    }
)  # fmt: skip
FULL_SHARE: Final = 0.95  # of a worker's KV blocks: the next prompt evicts or waits
BUSY_SHARE: Final = 0.8


def state_tone(word: str) -> Tone:
    """Return the tone of a state, a phase or an outcome."""
    return _STATE_TONES.get(word, Tone.NORMAL)


def _since(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else (now_ms - ms) / 1000


def _text(read: Callable[[Any], str | None], tone: Tone = Tone.NORMAL) -> Callable[[Any, int, int], Cell]:
    def cell(entry: Any, _now: int, _width: int) -> Cell:
        found = read(entry)
        return Cell(UNKNOWN, Tone.DIM) if not found else Cell(found, tone)

    return cell


def _state(read: Callable[[Any], str]) -> Callable[[Any, int, int], Cell]:
    return lambda entry, _now, _width: Cell(read(entry), state_tone(read(entry)))


def _since_cell(
    read: Callable[[Any], int | None], show: Callable[[float | None], str]
) -> Callable[[Any, int, int], Cell]:
    return lambda entry, now, _width: Cell(show(_since(read(entry), now)))


def _names(names: list[str]) -> str:
    return ",".join(names)


# -- workers -----------------------------------------------------------------------------------------------------------


def _kv(worker: WorkerView, _now: int, width: int) -> Cell:
    if worker.kv_blocks_used is None or not worker.kv_blocks_total:
        return Cell(UNKNOWN, Tone.DIM)
    share = worker.kv_blocks_used / worker.kv_blocks_total
    tone = Tone.BAD if share >= FULL_SHARE else Tone.WARN if share >= BUSY_SHARE else Tone.NORMAL
    return Cell(bar(share, width), tone)


def _note(worker: WorkerView, now: int, _width: int) -> Cell:
    parts = [worker.note] if worker.note else []
    if worker.queued and worker.queue_age_seconds is not None:
        parts.append(f"queue {exact(worker.queue_age_seconds)}")
    if worker.state_until_ms is not None and worker.state_until_ms > now:
        parts.append(f"{worker.state} for {age((worker.state_until_ms - now) / 1000)} more")
    return Cell(", ".join(parts), Tone.WARN if worker.state != "ready" else Tone.NORMAL)


WORKERS: Final = TableForm(
    "workers",
    "Workers",
    (
        Column("ID", _text(lambda w: w.id, Tone.STRONG), 6, 16, keeps_tail=True),
        Column("ROLE", _text(lambda w: w.role), 7, rank=4),
        Column("MODEL", _text(lambda w: _names(w.models)), 6, 28, rank=1),
        Column("STATE", _state(lambda w: w.state), 11),
        Column("RUN/LIM", lambda w, _n, _w: Cell(f"{w.running}/{UNKNOWN if w.limit is None else w.limit}"), 9, is_right=True),
        Column("QUE", _text(lambda w: count(w.queued)), 3, is_right=True, rank=2),
        Column("AGE", _since_cell(lambda w: w.since_ms, age), 4, is_right=True, rank=5),
        Column("TOK/S", _text(lambda w: per_second(w.output_tokens_per_second)), 6, is_right=True, rank=1),
        Column("KV%", _kv, 7, 12, rank=3, is_right=True),
        Column("HIT%", _text(lambda w: percent(w.prefix_hit_share)), 4, is_right=True, rank=6),
        Column("SILENT", _since_cell(lambda w: w.silent_ms, exact), 6, is_right=True, rank=7),
        Column("WIRE", _text(lambda w: w.wire), 6, rank=11),
        Column("ADDRESS", _text(lambda w: w.address), 15, 24, rank=12),
        Column("ADAPTERS", _text(lambda w: _names(w.adapters)), 8, 20, rank=14),
        Column("VERSION", _text(lambda w: w.version), 8, 12, rank=13),
        Column("CARD", _text(lambda w: w.card), 8, rank=15),
        Column("NOTE", _note, 12, 60, rank=2),
    ),
    (
        ("id", lambda w: w.id),
        ("running", lambda w: (-w.running, w.id)),
        ("queued", lambda w: (-(w.queued or 0), w.id)),
        ("KV", lambda w: (-(w.kv_blocks_used or 0) / (w.kv_blocks_total or 1), w.id)),
        ("tokens/s", lambda w: (-(w.output_tokens_per_second or 0.0), w.id)),
    ),
    "no worker is known",
)  # fmt: skip

# -- streams -----------------------------------------------------------------------------------------------------------


def _last(stream: StreamView, now: int, _width: int) -> Cell:
    silent = _since(stream.last_token_ms, now)
    return Cell(exact(silent), Tone.BAD if stream.is_stalled else Tone.NORMAL)


def _phase(stream: StreamView, _now: int, _width: int) -> Cell:
    return Cell(stream.phase, state_tone(stream.phase))


def _remark(stream: StreamView, _now: int, _width: int) -> Cell:
    words = ["STALLED"] if stream.is_stalled else []
    if stream.attempt > 1:
        words.append(f"attempt {stream.attempt}")
    if stream.client_bytes_waiting:
        words.append(f"{bytes_of(stream.client_bytes_waiting)} unread")
    return Cell(", ".join(words), Tone.BAD if stream.is_stalled else Tone.WARN)


STREAMS: Final = TableForm(
    "streams",
    "Streams",
    (
        Column("REQUEST", _text(lambda s: s.id, Tone.STRONG), 13, 45),
        Column("KEY", _text(lambda s: s.key), 6, 16, rank=6),
        Column("MODEL", _text(lambda s: s.model), 6, 28, rank=4),
        Column("ENDPOINT", _text(lambda s: s.endpoint), 10, 22, rank=11),
        Column("PHASE", _phase, 10),
        Column("AGE", _since_cell(lambda s: s.started_ms, age), 4, is_right=True),
        Column("WAIT", _text(lambda s: exact(s.queued_seconds)), 5, is_right=True, rank=7),
        Column("TTFT", _text(lambda s: exact(s.ttft_seconds)), 5, is_right=True, rank=5),
        Column("IN/CACHED", lambda s, _n, _w: Cell(f"{count(s.prompt_tokens)}/{count(s.cached_tokens)}"), 15, is_right=True, rank=8),
        Column("OUT/MAX", lambda s, _n, _w: Cell(f"{count(s.output_tokens)}/{short(s.max_tokens)}"), 11, is_right=True, rank=2),
        Column("TOK/S", _text(lambda s: per_second(s.tokens_per_second)), 6, is_right=True, rank=3),
        Column("LAST", _last, 6, is_right=True),
        Column("WORKER", _text(lambda s: s.workers[-1] if s.workers else None), 6, 16, rank=1, keeps_tail=True),
        Column("N", _text(lambda s: count(s.choices)), 2, is_right=True, rank=13),
        Column("PRIO", _text(lambda s: str(s.priority)), 4, is_right=True, rank=12),
        Column("CLIENT ID", _text(lambda s: s.client_request_id), 10, 36, rank=14),
        Column("", _remark, 9, 26),
    ),
    (
        ("oldest", lambda s: (s.started_ms, s.id)),
        ("newest", lambda s: (-s.started_ms, s.id)),
        ("longest silence", lambda s: (s.last_token_ms is None, s.last_token_ms or 0, s.id)),
        ("longest wait", lambda s: (-s.queued_seconds, s.id)),
        ("most output", lambda s: (-s.output_tokens, s.id)),
        ("slowest", lambda s: (s.tokens_per_second is None, s.tokens_per_second or 0.0, s.id)),
    ),
    "no request is in flight",
)  # fmt: skip

# -- the others --------------------------------------------------------------------------------------------------------


def _ready(model: ModelView, _now: int, _width: int) -> Cell:
    return Cell("ready", Tone.GOOD) if model.is_ready else Cell("NOT READY", Tone.BAD)


MODELS: Final = TableForm(
    "models",
    "Models",
    (
        Column("MODEL", _text(lambda m: m.name, Tone.STRONG), 14, 48),
        Column("NAMESPACE", _text(lambda m: m.namespace), 9, 16, rank=5),
        Column("STATE", _ready, 9),
        Column("WORKERS", _text(lambda m: " ".join(f"{role}:{number}" for role, number in m.workers.items())), 9, 30),
        Column("RUN/LIM", lambda m, _n, _w: Cell(f"{m.in_flight}/{UNKNOWN if m.limit is None else m.limit}"), 9, is_right=True),
        Column("WAIT", _text(lambda m: count(m.waiting)), 4, is_right=True, rank=1),
        Column("CONTEXT", _text(lambda m: short(m.context_length)), 8, is_right=True, rank=3),
        Column("BLOCK", _text(lambda m: count(m.block_size)), 5, is_right=True, rank=6),
        Column("ROUTER", _text(lambda m: m.router_mode), 6, 14, rank=4),
        Column("TYPES", _text(lambda m: _names(m.types)), 8, 30, rank=7),
        Column("BASE", _text(lambda m: m.parent), 6, 20, rank=8),
        Column("ADAPTERS", _text(lambda m: _names(m.adapters)), 8, 24, rank=9),
        Column("ALIASES", _text(lambda m: _names(m.aliases)), 8, 24, rank=10),
        Column("WHY NOT", _text(lambda m: m.why_not, Tone.WARN), 14, 60, rank=2),
    ),
    (("name", lambda m: (m.namespace, m.name)), ("in flight", lambda m: (-m.in_flight, m.id))),
    "no model is known: no worker has registered one",
)  # fmt: skip

FRONTENDS: Final = TableForm(
    "frontends",
    "Frontends",
    (
        Column("ID", _text(lambda f: f.id, Tone.STRONG), 10, 20),
        Column("HOST", _text(lambda f: f.host), 10, 24),
        Column("PID", _text(lambda f: str(f.pid)), 7, is_right=True),
        Column("STAGE", _state(lambda f: f.stage), 9),
        Column("RUN", _text(lambda f: count(f.in_flight)), 5, is_right=True),
        Column("AGE", _since_cell(lambda f: f.started_ms, age), 4, is_right=True),
        Column("CPU%", _text(lambda f: percent(f.cpu_share)), 4, is_right=True),
        Column("MEMORY", _text(lambda f: bytes_of(f.rss_bytes)), 9, is_right=True, rank=1),
        Column("LAG", _text(lambda f: exact(f.loop_lag_seconds)), 6, is_right=True, rank=2),
        Column("VERSION", _text(lambda f: f.version), 8, 14, rank=3),
    ),
    (("id", lambda f: f.id),),
    "no frontend",
)  # fmt: skip


def _status(recent: RecentView | ErrorGroup, _now: int, _width: int) -> Cell:
    tone = Tone.GOOD if recent.status < 400 else Tone.WARN if recent.status < 500 else Tone.BAD
    return Cell(str(recent.status), tone)


RECENT: Final = TableForm(
    "recent",
    "Recent",
    (
        Column("ENDED", lambda r, _n, _w: Cell(clock(r.ended_ms)), 8),
        Column("REQUEST", _text(lambda r: r.id, Tone.STRONG), 13, 45),
        Column("KEY", _text(lambda r: r.key), 6, 16, rank=6),
        Column("MODEL", _text(lambda r: r.model), 6, 28, rank=3),
        Column("CODE", _status, 4, is_right=True),
        Column("OUTCOME", _state(lambda r: r.outcome), 9),
        Column("TOOK", lambda r, _n, _w: Cell(exact((r.ended_ms - r.started_ms) / 1000)), 6, is_right=True),
        Column("WAIT", _text(lambda r: exact(r.queued_seconds)), 5, is_right=True, rank=7),
        Column("TTFT", _text(lambda r: exact(r.ttft_seconds)), 5, is_right=True, rank=2),
        Column("IN/CACHED", lambda r, _n, _w: Cell(f"{count(r.prompt_tokens)}/{count(r.cached_tokens)}"), 15, is_right=True, rank=5),
        Column("OUT", _text(lambda r: count(r.output_tokens)), 6, is_right=True, rank=4),
        Column("FINISH", _text(lambda r: r.finish_reason), 8, 12, rank=8),
        Column("WORKER", _text(lambda r: r.workers[-1] if r.workers else None), 6, 16, rank=9, keeps_tail=True),
        Column("TRIES", _text(lambda r: count(r.attempts)), 5, is_right=True, rank=10),
        Column("MESSAGE", _text(lambda r: r.message or r.code), 10, 60, rank=1),
    ),
    (
        ("newest", lambda r: (-r.ended_ms, r.id)),
        ("longest", lambda r: (r.started_ms - r.ended_ms, r.id)),
        ("status", lambda r: (-r.status, -r.ended_ms)),
    ),
    "no request has ended yet",
)  # fmt: skip


def _chosen(decision: RoutingView) -> str | None:
    return next((one.worker for one in decision.candidates if one.is_chosen), None)


def _overlap(decision: RoutingView) -> float | None:
    return next((one.overlap_blocks for one in decision.candidates if one.is_chosen), None)


ROUTING: Final = TableForm(
    "routing",
    "Routing decisions",
    (
        Column("AT", lambda d, _n, _w: Cell(clock(d.at_ms)), 8),
        Column("REQUEST", _text(lambda d: d.request_id, Tone.STRONG), 13, 45),
        Column("MODEL", _text(lambda d: d.model), 6, 28, rank=3),
        Column("STAGE", _text(lambda d: d.stage), 7, rank=2),
        Column("POLICY", _text(lambda d: d.policy), 8, 16, rank=4),
        Column("CHOSEN", _text(_chosen, Tone.GOOD), 8, 16, keeps_tail=True),
        Column("OVERLAP", _text(lambda d: count(_overlap(d))), 7, is_right=True, rank=1),
        Column("OF", _text(lambda d: count(d.candidates_in_all or len(d.candidates))), 4, is_right=True, rank=5),
        Column("DECIDED BY", _text(lambda d: d.decided_by), 14, 60),
    ),
    (("newest", lambda d: (-d.at_ms, d.id)),),
    "no routing decision was kept",
)  # fmt: skip

CACHES: Final = TableForm(
    "caches",
    "Prefix caches",
    (
        Column("ID", _text(lambda c: c.id, Tone.STRONG), 6, 16, keeps_tail=True),
        Column("ROLE", _text(lambda c: c.role), 7, rank=4),
        Column("MODEL", _text(lambda c: c.model), 6, 28, rank=2),
        Column("KNOWN", _text(lambda c: count(c.blocks_known)), 7, is_right=True),
        Column("TOTAL", _text(lambda c: count(c.blocks_total)), 7, is_right=True, rank=3),
        Column("INDEX%", _text(lambda c: percent(c.index_share)), 6, is_right=True, rank=5),
        Column("HIT%", _text(lambda c: percent(c.hit_share)), 4, is_right=True),
        Column("HITS/MIN", _text(lambda c: count(c.hit_blocks_per_minute)), 8, is_right=True),
        Column("5 MIN", lambda c, _n, width: Cell(sparkline(c.history, width)), 12, 30, rank=1),
        Column("EVICT/MIN", _text(lambda c: count(c.evicted_blocks_per_minute)), 9, is_right=True, rank=4),
        Column("GAPS", _text(lambda c: count(c.gaps)), 4, is_right=True, rank=6),
        Column("RESYNCS", _text(lambda c: count(c.resyncs)), 7, is_right=True, rank=6),
        Column("TRUST", _text(lambda c: c.trust), 9, rank=7),
    ),
    (
        ("id", lambda c: (c.model, c.id)),
        ("known", lambda c: (-(c.blocks_known or 0), c.id)),
        ("hits", lambda c: (-(c.hit_blocks_per_minute or 0.0), c.id)),
        ("evictions", lambda c: (-(c.evicted_blocks_per_minute or 0.0), c.id)),
    ),
    "no worker with a block size is known",
)  # fmt: skip

PREFIXES: Final = TableForm(
    "prefixes",
    "Prefix cache: who holds what",
    (
        Column("PREFIX", _text(lambda p: p.id, Tone.STRONG), 10, 18),
        Column("MODEL", _text(lambda p: p.model), 6, 28, rank=2),
        Column("BLOCKS", _text(lambda p: count(p.blocks)), 7, is_right=True),
        Column("DEPTH", _text(lambda p: count(p.depth)), 6, is_right=True, rank=1),
        Column("HITS", _text(lambda p: count(p.hits)), 7, is_right=True),
        Column("HELD BY", _text(lambda p: str(len(p.holders))), 7, is_right=True),
        Column("WORKERS", _text(lambda p: " ".join(p.holders)), 12, 80),
    ),
    (
        ("most hits", lambda p: (-(p.hits or 0), -p.blocks * len(p.holders), p.id)),
        ("most held", lambda p: (-len(p.holders), -p.blocks, p.id)),
        ("longest", lambda p: (-p.blocks, p.id)),
    ),
    "no prefix is known: only the kv router mode keeps an index",
)  # fmt: skip

ERRORS: Final = TableForm(
    "errors",
    "Errors",
    (
        Column("CODE", _status, 4, is_right=True),
        Column("KIND", _text(lambda e: e.code), 10, 24, rank=2),
        Column("COUNT", _text(lambda e: count(e.count), Tone.STRONG), 6, is_right=True),
        Column("/MIN", _text(lambda e: per_second(e.per_minute)), 5, is_right=True, rank=1),
        Column("FIRST", _since_cell(lambda e: e.first_ms, age), 5, is_right=True, rank=5),
        Column("LAST", _since_cell(lambda e: e.last_ms, age), 5, is_right=True),
        Column("MODEL", _text(lambda e: e.model), 6, 20, rank=3),
        Column("WORKER", _text(lambda e: e.worker), 6, 16, rank=4, keeps_tail=True),
        Column("MESSAGE", _text(lambda e: e.message), 20, 90),
        Column("EXAMPLE", _text(lambda e: e.example), 13, 45, rank=10),
    ),
    (
        ("newest", lambda e: (-e.last_ms, e.id)),
        ("most", lambda e: (-e.count, e.id)),
        ("fastest", lambda e: (-e.per_minute, e.id)),
    ),
    "no failure was kept",
)  # fmt: skip

EVENTS: Final = TableForm(
    "events",
    "Events",
    (
        Column("AT", lambda e, _n, _w: Cell(clock(e.at_ms)), 8),
        Column("KIND", _text(lambda e: e.kind, Tone.STRONG), 18, 20),
        Column("WORKER", _text(lambda e: e.worker), 6, 16, rank=2, keeps_tail=True),
        Column("MODEL", _text(lambda e: e.model), 6, 20, rank=3),
        Column("BY", _text(lambda e: e.by), 6, 16, rank=4),
        Column("WHAT", _text(lambda e: e.text), 24, 120),
        Column("REQUEST", _text(lambda e: e.request_id), 13, 45, rank=10),
    ),
    (("newest", lambda e: (-e.at_ms, e.id)),),
    "nothing has happened yet",
)  # fmt: skip

FORMS: Final[Mapping[str, TableForm]] = MappingProxyType(
    {
        form.view: form
        for form in (WORKERS, STREAMS, MODELS, FRONTENDS, RECENT, ROUTING, CACHES, PREFIXES, ERRORS, EVENTS)
    }
)  # fmt: skip
"""By the name of its view."""
