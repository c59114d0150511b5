"""One request, one routing decision, or one row of any table, as lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from dynamo.cli.inspect.figures import UNKNOWN, bytes_of, clock, count, exact, short, sparkline
from dynamo.cli.inspect.lines import Cell, Column, Line, TableForm, Tone, TonedText, flow, heading
from dynamo.cli.inspect.tables import state_tone
from dynamo.protocol.inspector.views import CandidateView, RecentView, RequestDetail, RoutingView, StreamView

_GLYPHS: Final[Mapping[str, tuple[str, Tone]]] = MappingProxyType(
    {
        "admitted": ("·", Tone.DIM),
        "preprocess": ("-", Tone.NORMAL),
        "route": ("+", Tone.NORMAL),
        "queued": ("░", Tone.WARN),
        "encode": ("▚", Tone.ACCENT),
        "prefill": ("▒", Tone.ACCENT),
        "transfer": ("=", Tone.NORMAL),
        "decode": ("█", Tone.GOOD),
        "sending": ("▄", Tone.NORMAL),
        "client slow": ("▂", Tone.BAD),
    }
)
"""How a phase is drawn in the bar of a request; its legend names each."""

_FALLBACK: Final = ("▪", Tone.NORMAL)
MOST_CONTENT_LINES: Final = 400
MOST_EVENTS: Final = 50


def detail_lines(detail: RequestDetail, now_ms: int, width: int) -> list[Line]:
    """Return all that is known of one request."""
    found = [*_head(detail, now_ms, width)]
    if detail.timeline:
        found += [(), *_timeline(detail, now_ms, width)]
    if detail.fallbacks:
        found += [(), heading("Models", width)]
    for step in detail.fallbacks:
        reason = f"{step.reason} ({step.error})" if step.error else step.reason
        at = TonedText.of(f" {step.model}  {clock(step.at_ms)}  ")
        found.append((at, TonedText.of(reason, Tone.WARN), TonedText.of(f"  then {step.next_model}")))
    for decision in detail.routing:
        found += [(), *decision_lines(decision, width)]
    if detail.attempts:
        found += [(), heading("Attempts", width, f"limit {count(detail.attempt_limit)}")]
        for attempt in detail.attempts:
            found.append(
                (
                    TonedText.of(f" {attempt.number}  {attempt.worker}  {clock(attempt.at_ms)}  "),
                    TonedText.of(attempt.outcome, state_tone(attempt.outcome)),
                    TonedText(f"  {count(attempt.output_tokens)} tokens"),
                )
            )
    if detail.parameters:
        shown = [_pair(name, _value(value)) for name, value in detail.parameters.items()]
        found += [(), heading("Parameters", width), *flow(shown, width)]
    if detail.token_rates:
        cells = min(60, max(10, width - 30))
        newest = f"  now {detail.token_rates[-1]:.1f}, most {max(detail.token_rates):.1f}"
        spark = sparkline(detail.token_rates, min(cells, len(detail.token_rates)))
        found += [
            (),
            heading("Tokens per second, the last minute", width),
            (TonedText(f" {spark}", Tone.ACCENT), TonedText(newest)),
        ]
    if detail.events:
        found += [(), heading("Events", width)]
        found += [
            (TonedText(f" {clock(event.at_ms)}  ", Tone.DIM), TonedText.of(f"{event.kind}  "), TonedText.of("" if event.text == event.kind else event.text))
            for event in detail.events[-MOST_EVENTS:]
        ]  # fmt: skip
    found += [(), *_content(detail, width)]
    return found


def _head(detail: RequestDetail, now_ms: int, width: int) -> Iterator[Line]:
    one: StreamView | RecentView | None = detail.stream or detail.recent
    if one is None:
        yield (TonedText(" nothing is known of this request any more", Tone.DIM),)
        return
    state = detail.stream.phase if detail.stream else detail.recent.outcome if detail.recent else ""
    yield (
        TonedText.of(f" {one.id}", Tone.STRONG),
        TonedText("  "),
        TonedText.of(state, state_tone(state)),
        *_stalled(detail.stream),
    )
    end = now_ms if detail.recent is None else detail.recent.ended_ms
    facts = [
        _pair("model", (one.model or UNKNOWN) + (f", served by {one.served_by}" if one.served_by else "")),
        _pair("key", one.key or UNKNOWN),
        _pair("endpoint", one.endpoint),
        _pair("started", f"{clock(one.started_ms)} ({exact((end - one.started_ms) / 1000)})"),
        _pair("wait", exact(one.queued_seconds)),
        _pair("TTFT", exact(one.ttft_seconds)),
        _pair("in", f"{count(one.prompt_tokens)}, cached {count(one.cached_tokens)}"),
        _pair("out", count(one.output_tokens) + (f" of {short(detail.stream.max_tokens)}" if detail.stream else "")),
        _pair("workers", " then ".join(one.workers) or UNKNOWN),
        _pair("frontend", one.frontend),
    ]
    if one.client_request_id:
        facts.append(_pair("client's id", one.client_request_id))
    if detail.stream is not None:
        facts += _of_stream(detail.stream)
    if detail.recent is not None:
        facts += [_pair("status", str(detail.recent.status)), _pair("finish", detail.recent.finish_reason or UNKNOWN)]
    yield from flow(facts, width)
    if detail.recent is not None and (detail.recent.message or detail.recent.code):
        text = ": ".join(part for part in (detail.recent.code, detail.recent.message) if part)
        yield (TonedText.of(f" {text}", Tone.BAD),)


def _stalled(stream: StreamView | None) -> tuple[TonedText, ...]:
    return (TonedText("  STALLED", Tone.BAD),) if stream is not None and stream.is_stalled else ()


def _of_stream(stream: StreamView) -> list[Line]:
    found = [
        _pair("stream", "yes" if stream.is_streaming else "no"),
        _pair("attempt", str(stream.attempt)),
        _pair("n", str(stream.choices)),
        _pair("priority", str(stream.priority)),
    ]
    if stream.client_bytes_waiting:
        found.append(_pair("the client has not read", bytes_of(stream.client_bytes_waiting)))
    return found


def _pair(name: str, value: str) -> Line:
    return (TonedText.of(f"{name} ", Tone.DIM), TonedText.of(value))


def _value(value: object) -> str:
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else json.dumps(value)


def _timeline(detail: RequestDetail, now_ms: int, width: int) -> Iterator[Line]:
    end = now_ms if detail.recent is None else detail.recent.ended_ms
    phases = [(name, max(0, (end if last is None else last) - first)) for name, first, last in detail.timeline]
    yield heading("Timeline", width)
    cells = _shares([length for _, length in phases], width - 2)
    bar: list[TonedText] = [TonedText(" ")]
    for (name, _), number in zip(phases, cells, strict=True):
        glyph, tone = _GLYPHS.get(name, _FALLBACK)
        bar.append(TonedText(glyph * number, tone))
    yield tuple(bar)
    legend: list[Line] = []
    for name, length in phases:
        glyph, tone = _GLYPHS.get(name, _FALLBACK)
        legend.append((TonedText(f"{glyph} ", tone), TonedText.of(f"{name} {exact(length / 1000)}")))
    stream = detail.stream
    if stream is not None and stream.last_token_ms is not None:
        tone = Tone.BAD if stream.is_stalled else Tone.DIM
        legend.append((TonedText(f"silent {exact((now_ms - stream.last_token_ms) / 1000)}", tone),))
    yield from flow(legend, width)


def _shares(lengths: Sequence[int], cells: int) -> list[int]:
    """Share cells out by length, at least one to each while there are enough."""
    if cells < len(lengths):
        return [1] * max(0, cells) + [0] * (len(lengths) - max(0, cells))
    total = sum(lengths) or 1
    room = cells - len(lengths)
    found = [1 + int(room * length / total) for length in lengths]
    found[max(range(len(lengths)), key=lengths.__getitem__)] += cells - sum(found)
    return found


# -- routing -----------------------------------------------------------------------------------------------------------


def _figure(value: float | None, digits: int = 0) -> Cell:
    return Cell(UNKNOWN, Tone.DIM) if value is None else Cell(f"{value:,.{digits}f}")


def _verdict(candidate: CandidateView, _now: int, _width: int) -> Cell:
    if candidate.is_chosen:
        return Cell("◀ chosen", Tone.GOOD)
    return Cell("" if candidate.left_out is None else f"left out: {candidate.left_out}", Tone.WARN)


_CANDIDATES: Final = TableForm(
    "candidates",
    "Candidates",
    (
    Column("WORKER", lambda c, _n, _w: Cell(f"{c.worker}.{c.rank}" if c.rank else c.worker, Tone.STRONG), 8, 20, keeps_tail=True),
    Column("OVERLAP", lambda c, _n, _w: _figure(c.overlap_blocks), 7, is_right=True),
    Column("PREFILL", lambda c, _n, _w: _figure(c.prefill_tokens), 8, is_right=True, rank=1),
    Column("DECODE", lambda c, _n, _w: _figure(c.decode_blocks, 1), 8, is_right=True, rank=2),
    Column("RUN", lambda c, _n, _w: _figure(c.running), 5, is_right=True, rank=3),
    Column("COST", lambda c, _n, _w: _figure(c.cost, 1), 8, is_right=True),
    Column("", _verdict, 20, 80),
    ),
    (),
    "there was no candidate",
)  # fmt: skip


def decision_lines(decision: RoutingView, width: int) -> list[Line]:
    """Return one routing decision with every candidate that was kept of it."""
    total = max(decision.candidates_in_all, len(decision.candidates))
    listed = count(total) if total == len(decision.candidates) else f"{len(decision.candidates)} of {count(total)}"
    about = [
        _pair("stage", decision.stage),
        _pair("policy", decision.policy),
        _pair("candidates", listed),
        _pair("prompt", f"{count(decision.prompt_tokens)} tokens, blocks of {count(decision.block_size)}"),
        _pair("at", clock(decision.at_ms)),
    ]
    least = [0] * len(_CANDIDATES.columns)
    placed = _CANDIDATES.at(width, _CANDIDATES.longest(decision.candidates, decision.at_ms, least))
    rows = [placed.row(candidate, decision.at_ms) for candidate in decision.candidates]
    return [
        heading("Route", width, f"decided by: {decision.decided_by}"),
        *flow(about, width),
        placed.head(),
        *rows,
    ]


# -- the rest ----------------------------------------------------------------------------------------------------------


def record_lines(title: str, entry: Struct, now_ms: int, width: int) -> list[Line]:
    """Return all members of one row, each in full."""
    found: list[Line] = [heading(title, width)]
    names = entry.__struct_fields__
    widest = max(map(len, names))
    for name in names:
        value = getattr(entry, name)
        text = _value(value)
        if name.endswith("_ms") and isinstance(value, int):
            text = f"{clock(value, with_date=True)} ({exact((now_ms - value) / 1000)} ago)"
        found += _wrapped(f" {name:{widest}}  ", text, width)
    return found


def _wrapped(label: str, text: str, width: int) -> Iterator[Line]:
    shown = TonedText.of(text).text
    room = max(10, width - len(label) - 1)
    for begin in range(0, max(1, len(shown)), room):
        yield (TonedText(label if begin == 0 else " " * len(label), Tone.DIM), TonedText(shown[begin : begin + room]))


def _content(detail: RequestDetail, width: int) -> Iterator[Line]:
    if detail.content is None:
        yield (
            TonedText(
                " text is not shown: the frontend needs --inspect-content, and the key the role for it", Tone.DIM
            ),
        )
        return
    for name, value in detail.content.items():
        yield heading(name, width)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        for line in text.split("\n")[:MOST_CONTENT_LINES]:
            yield from _wrapped(" ", line, width)
