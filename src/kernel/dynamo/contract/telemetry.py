"""Spans for engine authors, and the recorder behind the `engine.generate` span.

Nothing here costs anything or needs a package unless `OTEL_EXPORT_ENABLED` is set and the `otel` extra is installed.
"""

from __future__ import annotations

from typing import Any, Final

from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.tracing import NO_SPAN, RequestSpan, SpanProxy, start_request_span

__all__ = ["GenerateSpan", "current_span", "engine_trace_kwargs", "start_span", "trace_headers"]


def current_span(context: Any) -> SpanProxy:
    """Return the request's span; a silent span where nothing is exported, also for contexts without spans (test doubles)."""
    get = getattr(context, "current_span", None)
    return NO_SPAN if get is None else get()


def start_span(context: Any, name: str, **attrs: Any) -> SpanProxy:
    """Open a child of the request's span: `with start_span(context, "tokenize", tokens=3): ...`."""
    start = getattr(context, "start_span", None)
    return NO_SPAN if start is None else start(name, attrs or None)


def trace_headers(context: Any) -> dict[str, str] | None:
    """Return the W3C headers for a call made on behalf of this request; None without a trace."""
    get = getattr(context, "trace_headers", None)
    return None if get is None else get()


def engine_trace_kwargs(context: Any, *, kwarg_name: str = "trace_headers", enabled: bool = True) -> dict[str, Any]:
    """Return `{kwarg_name: headers}` for an engine's own generate call; `{}` without a trace or `enabled`."""
    headers = trace_headers(context) if enabled else None
    return {kwarg_name: headers} if headers else {}


MAX_GAPS: Final = 4096
"""Inter-token gaps kept of one stream. Past it every second one is dropped and from then on every second one is kept
(then every fourth, ...): the percentiles stay those of an even sample, mean and maximum stay exact."""


class _Gaps:
    """Inter-token times of one stream, in seconds, in bounded memory."""

    __slots__ = ("_kept", "_stride", "count", "longest", "total")

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._stride = 1
        self.count = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        if self.count % self._stride == 0:
            self._kept.append(seconds)
            if len(self._kept) >= MAX_GAPS:
                del self._kept[1::2]
                self._stride *= 2
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)

    def percentiles(self, *quantiles: float) -> list[float]:
        """Return the nearest-rank values; call it only when `count` > 0."""
        ordered = sorted(self._kept)
        return [nearest_rank(ordered, quantile) for quantile in quantiles]


def nearest_rank(ordered: list[float], quantile: float) -> float:
    """Return the element at `round((n - 1) * q)`, halves away from zero. `ordered` must not be empty."""
    return ordered[int((len(ordered) - 1) * quantile + 0.5)]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


class GenerateSpan:
    """What the `engine.generate` span learns from one stream.

    `begin` returns None when nothing is exported, so that the hot path has nothing to call. Exactly one of `finish`,
    `fail` and `dropped` ends the span; the first wins, later ones are ignored. Times are of one clock, in seconds.
    """

    __slots__ = ("_ended", "_first_at", "_gaps", "_last_at", "_span", "_started_at")

    def __init__(self, span: RequestSpan, started_at: float) -> None:
        self._span = span
        self._started_at = started_at
        self._first_at: float | None = None
        self._last_at = 0.0
        self._gaps = _Gaps()
        self._ended = False

    @classmethod
    def begin(
        cls,
        context: Context,
        *,
        now: float,
        model: str,
        input_tokens: int,
        role: str,
        migration_link: Any = None,
    ) -> GenerateSpan | None:
        """Open the span and attach it to `context`; None when the request is not traced.

        `role` is `agg`, `prefill`, `decode` or `encode`; `migration_link` is the request's own member.
        """
        span = start_request_span(context, model=model, input_tokens=input_tokens, role=role, link=migration_link)
        return None if span is None else cls(span, now)

    def worker_trace_link(self) -> dict[str, str]:
        """Return what the first non-empty chunk (prefill, encode: the terminal) carries as `worker_trace_link`."""
        return {"trace_id": self._span.trace_id or "", "span_id": self._span.span_id or ""}

    def on_chunk(self, now: float, n_tokens: int) -> None:
        """Note a chunk yielded at `now`; an empty chunk does not count for the engine's pace."""
        if n_tokens <= 0:
            return
        if self._first_at is None:
            self._first_at = now
            self._span.set_attribute("ttft_ms", _milliseconds(now - self._started_at))
        else:
            self._gaps.add(now - self._last_at)
        self._last_at = now

    def finish(self, output_tokens: int, finish_reason: str | None, cancelled: bool) -> None:
        """Note the terminal chunk."""
        if self._ended:
            return
        self._outcome(output_tokens, finish_reason or "", cancelled=cancelled)
        if finish_reason == "error":
            self._span.set_status("error", "the engine ended the stream with an error")
        self._end()

    def fail(self, kind: str, *, output_tokens: int | None = None) -> None:
        """Record the error that ended the stream; `kind` is the error's class name, or `setup_failed` before the
        first step.
        """
        if self._ended:
            return
        if output_tokens is not None:
            self._span.set_attribute("output_tokens", output_tokens)
        self._pace()
        self._span.set_attribute("error_kind", kind)
        self._span.set_status("error", kind)
        self._end()

    def dropped(self, output_tokens: int = 0) -> None:
        """Record a stream closed before its terminal chunk."""
        if self._ended:
            return
        self._outcome(output_tokens, "Dropped", cancelled=True)
        self._span.set_status("error", "the stream was dropped before its terminal chunk")
        self._end()

    def _outcome(self, output_tokens: int, finish_reason: str, *, cancelled: bool) -> None:
        self._span.set_attribute("output_tokens", output_tokens)
        self._span.set_attribute("finish_reason", finish_reason)
        self._span.set_attribute("cancelled", cancelled)
        self._pace()

    def _pace(self) -> None:
        if not self._gaps.count:
            return
        middle, high = self._gaps.percentiles(0.5, 0.99)
        self._span.set_attribute("avg_itl_ms", _milliseconds(self._gaps.total / self._gaps.count))
        self._span.set_attribute("itl_p50_ms", _milliseconds(middle))
        self._span.set_attribute("itl_p99_ms", _milliseconds(high))
        self._span.set_attribute("itl_max_ms", _milliseconds(self._gaps.longest))

    def _end(self) -> None:
        self._ended = True
        self._span.finish()
