"""The tables of the inspector on the terminal: for each view how a form is written, and the orders of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

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
from dynamo.cli.inspect.lines import Cell, CellOf, Column, TableForm, Tone
from dynamo.protocol.inspector.columns import COLUMNS, Form, ViewColumn
from dynamo.protocol.inspector.views import (
    CacheView,
    ErrorGroup,
    EventView,
    FrontendView,
    ModelView,
    PrefixView,
    RecentView,
    ResidentView,
    RoutingView,
    StreamView,
    WorkerView,
)

_STATE_TONES: Final[Mapping[str, Tone]] = MappingProxyType(
    {
        "ready": Tone.GOOD, "serving": Tone.GOOD, "ok": Tone.GOOD, "loaded": Tone.GOOD,
        "loading": Tone.WARN, "closing": Tone.WARN, "unloading": Tone.WARN,
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


E = TypeVar("E")


def _since(ms: int | None, now_ms: int) -> float | None:
    return None if ms is None else (now_ms - ms) / 1000


_WRITERS: Final[Mapping[Form, Callable[..., str | None]]] = MappingProxyType({
    Form.NAME: str, Form.TEXT: str, Form.STATE: str, Form.NUMBER: str, Form.NAMES: ",".join, Form.CLOCK: clock,
    Form.COUNT: count, Form.SIZE: short, Form.BYTES: bytes_of, Form.RATE: per_second, Form.SHARE: percent,
    Form.SECONDS: exact, Form.AGE: age, Form.SILENCE: exact,
})  # fmt: skip


def _cell(column: ViewColumn) -> CellOf[object]:
    """Return what writes the cells of a column whose form is not its own."""
    form, members = column.form, column.members
    if form is Form.RATIO:
        return lambda entry, _now, _width: Cell("/".join(count(getattr(entry, name)) for name in members))
    write, (member,) = _WRITERS[form], members
    is_time = form in (Form.AGE, Form.SILENCE)
    plain = Tone.STRONG if form is Form.NAME else Tone.NORMAL

    def cell(entry: object, now: int, _width: int) -> Cell:
        value = getattr(entry, member)
        text = write(_since(value, now) if is_time else value) if value is not None or column.form.is_number else None
        if not text:
            return Cell(UNKNOWN, Tone.DIM)
        return Cell(text, state_tone(text) if form is Form.STATE else plain)

    return cell


def _form(
    view: str,
    title: str,
    nothing: str,
    orders: Sequence[tuple[str, Callable[[E], str | tuple[object, ...]]]],
    own: Mapping[str, CellOf[E]] = MappingProxyType({}),
) -> TableForm[E]:
    """Make the table of a view; `own`: the cells of columns that more than their form decides, by their ids."""
    columns = [
        Column(
            cells.title,
            own.get(column.id) or _cell(column),
            cells.width,
            cells.widest,
            cells.rank,
            column.form.is_number,
            cells.keeps_tail,
        )
        for column in COLUMNS[view]
        if (cells := column.terminal) is not None
    ]
    return TableForm(view, title, tuple(columns), tuple(orders), nothing)


def _text(read: Callable[[E], str | None], tone: Tone = Tone.NORMAL) -> CellOf[E]:
    def cell(entry: E, _now: int, _width: int) -> Cell:
        found = read(entry)
        return Cell(UNKNOWN, Tone.DIM) if not found else Cell(found, tone)

    return cell


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


WORKERS: Final[TableForm[WorkerView]] = _form(
    "workers",
    "Workers",
    "no worker is known",
    (
        ("id", lambda w: w.id),
        ("running", lambda w: (-w.running, w.id)),
        ("queued", lambda w: (-(w.queued or 0), w.id)),
        ("KV", lambda w: (-(w.kv_blocks_used or 0) / (w.kv_blocks_total or 1), w.id)),
        ("tokens/s", lambda w: (-(w.output_tokens_per_second or 0.0), w.id)),
    ),
    {"kv": _kv, "note": _note},
)


def _last(stream: StreamView, now: int, _width: int) -> Cell:
    silent = _since(stream.last_token_ms, now)
    return Cell(exact(silent), Tone.BAD if stream.is_stalled else Tone.NORMAL)


def _remark(stream: StreamView, _now: int, _width: int) -> Cell:
    words = ["STALLED"] if stream.is_stalled else []
    if stream.attempt > 1:
        words.append(f"attempt {stream.attempt}")
    if stream.client_bytes_waiting:
        words.append(f"{bytes_of(stream.client_bytes_waiting)} unread")
    return Cell(", ".join(words), Tone.BAD if stream.is_stalled else Tone.WARN)


STREAMS: Final[TableForm[StreamView]] = _form(
    "streams",
    "Streams",
    "no request is in flight",
    (
        ("oldest", lambda s: (s.started_ms, s.id)),
        ("newest", lambda s: (-s.started_ms, s.id)),
        ("longest silence", lambda s: (s.last_token_ms is None, s.last_token_ms or 0, s.id)),
        ("longest wait", lambda s: (-s.queued_seconds, s.id)),
        ("most output", lambda s: (-s.output_tokens, s.id)),
        ("slowest", lambda s: (s.tokens_per_second is None, s.tokens_per_second or 0.0, s.id)),
    ),
    {
        "out": lambda s, _n, _w: Cell(f"{count(s.output_tokens)}/{short(s.max_tokens)}"),
        "last": _last,
        "worker": _text(lambda s: s.workers[-1] if s.workers else None),
        "remark": _remark,
    },
)


def _ready(model: ModelView, _now: int, _width: int) -> Cell:
    return Cell("ready", Tone.GOOD) if model.is_ready else Cell("NOT READY", Tone.BAD)


MODELS: Final[TableForm[ModelView]] = _form(
    "models",
    "Models",
    "no model is known: no worker has registered one",
    (("name", lambda m: (m.namespace, m.name)), ("in flight", lambda m: (-m.in_flight, m.id))),
    {
        "ready": _ready,
        "workers": _text(lambda m: " ".join(f"{role}:{number}" for role, number in m.workers.items())),
        "why_not": _text(lambda m: m.why_not, Tone.WARN),
    },
)


RESIDENTS: Final[TableForm[ResidentView]] = _form(
    "residents",
    "Models on demand",
    "no model is loaded on demand: dynamo serve with several models does that",
    (
        ("name", lambda m: m.id),
        ("memory", lambda m: (-(m.taken_bytes or 0), m.id)),
        ("waiting", lambda m: (-m.waiting, -m.running, m.id)),
        ("last used", lambda m: (-(m.used_ms or 0), m.id)),
    ),
    {"pinned": _text(lambda m: "pinned" if m.is_pinned else None), "why": _text(lambda m: m.why, Tone.WARN)},
)


FRONTENDS: Final[TableForm[FrontendView]] = _form(
    "frontends",
    "Frontends",
    "no frontend",
    (("id", lambda f: f.id),),
)


def _status(recent: RecentView | ErrorGroup, _now: int, _width: int) -> Cell:
    tone = Tone.GOOD if recent.status < 400 else Tone.WARN if recent.status < 500 else Tone.BAD
    return Cell(str(recent.status), tone)


RECENT: Final[TableForm[RecentView]] = _form(
    "recent",
    "Recent",
    "no request has ended yet",
    (
        ("newest", lambda r: (-r.ended_ms, r.id)),
        ("longest", lambda r: (r.started_ms - r.ended_ms, r.id)),
        ("status", lambda r: (-r.status, -r.ended_ms)),
    ),
    {
        "status": _status,
        "took": lambda r, _n, _w: Cell(exact((r.ended_ms - r.started_ms) / 1000)),
        "worker": _text(lambda r: r.workers[-1] if r.workers else None),
        "message": _text(lambda r: r.message or r.code),
    },
)


def _chosen(decision: RoutingView) -> str | None:
    return next((one.worker for one in decision.candidates if one.is_chosen), None)


def _overlap(decision: RoutingView) -> float | None:
    return next((one.overlap_blocks for one in decision.candidates if one.is_chosen), None)


ROUTING: Final[TableForm[RoutingView]] = _form(
    "routing",
    "Routing decisions",
    "no routing decision was kept",
    (("newest", lambda d: (-d.at_ms, d.id)),),
    {
        "chosen": _text(_chosen, Tone.GOOD),
        "overlap": _text(lambda d: count(_overlap(d))),
        "of": _text(lambda d: count(d.candidates_in_all or len(d.candidates))),
    },
)


CACHES: Final[TableForm[CacheView]] = _form(
    "caches",
    "Prefix caches",
    "no worker with a block size is known",
    (
        ("id", lambda c: (c.model, c.id)),
        ("known", lambda c: (-(c.blocks_known or 0), c.id)),
        ("hits", lambda c: (-(c.hit_blocks_per_minute or 0.0), c.id)),
        ("evictions", lambda c: (-(c.evicted_blocks_per_minute or 0.0), c.id)),
    ),
    {"history": lambda c, _n, width: Cell(sparkline(c.history, width))},
)


PREFIXES: Final[TableForm[PrefixView]] = _form(
    "prefixes",
    "Prefix cache: who holds what",
    "no prefix is known: only the kv router mode keeps an index",
    (
        ("most hits", lambda p: (-(p.hits or 0), -p.blocks * len(p.holders), p.id)),
        ("most held", lambda p: (-len(p.holders), -p.blocks, p.id)),
        ("longest", lambda p: (-p.blocks, p.id)),
    ),
    {"held": _text(lambda p: str(len(p.holders))), "by": _text(lambda p: " ".join(p.holders))},
)


ERRORS: Final[TableForm[ErrorGroup]] = _form(
    "errors",
    "Errors",
    "no failure was kept",
    (
        ("newest", lambda e: (-e.last_ms, e.id)),
        ("most", lambda e: (-e.count, e.id)),
        ("fastest", lambda e: (-e.per_minute, e.id)),
    ),
    {"status": _status, "count": _text(lambda e: count(e.count), Tone.STRONG)},
)


EVENTS: Final[TableForm[EventView]] = _form(
    "events",
    "Events",
    "nothing has happened yet",
    (("newest", lambda e: (-e.at_ms, e.id)),),
)

FORMS: Final[Mapping[str, TableForm[Any]]] = MappingProxyType(
    {
        form.view: form
        for form in (WORKERS, STREAMS, MODELS, RESIDENTS, FRONTENDS, RECENT, ROUTING, CACHES, PREFIXES, ERRORS, EVENTS)
    }
)
"""By the name of its view."""
