"""What the log and the trace keep of one request of the frontend; metrics are counted apart."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.plan import Tally
from dynamo.frontend.pipeline.stage_timer import ROUTE
from dynamo.runtime.log_site import LogSite
from dynamo.runtime.logging import close_log_span, enter_log_span, request_level
from dynamo.runtime.request_log import COMPLETED, RECEIVED
from dynamo.runtime.tracing import RequestSpan, is_tracing, start_server_span

__all__ = ["CLIENT_LEFT", "GEN_AI_OPERATIONS", "begin_record", "end_record", "log_declined", "worker_fields"]

logger = logging.getLogger(__name__)
_completed: Final = LogSite(logger, COMPLETED, "end_record")

SENT: Final = "http response sent"
SPAN: Final = "http-request"
CLIENT_LEFT: Final = 499  # in logs and traces; the client does not read it

# The names of OpenTelemetry's GenAI conventions (in development; as of autumn 2026), in one place for the next renaming.
GEN_AI_OPERATIONS: Final[Mapping[str, str]] = {
    "chat_completions": "chat",
    "completions": "text_completion",
    "messages": "chat",
    "responses": "chat",
}
_OPERATION: Final = "gen_ai.operation.name"
_PROVIDER: Final = "gen_ai.provider.name"
_REQUEST_MODEL: Final = "gen_ai.request.model"
_STREAM: Final = "gen_ai.request.stream"
_RESPONSE_ID: Final = "gen_ai.response.id"
_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"


def begin_record(exchange: Exchange) -> None:
    """Log an admitted request, open its server span, and name it in the task's further records."""
    context, ids = exchange.context, _ids(exchange)
    if is_tracing():
        span = start_server_span(context, f"POST {exchange.arrival.path}", _span_attributes(exchange))
        ids["trace_id"] = context.trace_id
        if span is not None:
            ids["span_id"] = span.span_id
    if (trace := context.trace) is not None:
        ids["trace_id"], ids["parent_id"] = context.trace_id, trace.span_id
    enter_log_span(SPAN, ids)
    level = request_level()
    if logger.isEnabledFor(level):
        logger.log(level, RECEIVED, extra=_request_fields(exchange))


def end_record(
    exchange: Exchange, now: float, http_status: int = 200, error_type: str = "", error: str | None = None
) -> None:
    """Log the end of the request at `now`, and end its span. Call it once, in the task of `begin_record`.

    `error_type` is the label of the metrics, "" for success; `error` is the error text that the client received.
    """
    seconds = now - exchange.arrival.at
    if logger.isEnabledFor(logging.INFO):
        fields, level, elapsed = _request_fields(exchange), request_level(), round(seconds * 1000, 3)
        if level == logging.INFO or logger.isEnabledFor(level):
            logger.log(level, SENT, extra={**fields, "http_status": http_status, "latency_ms": elapsed})
        fields["status"] = "error" if error_type else "success"
        fields["http_status"] = http_status
        if error_type:
            fields["error_type"] = error_type
        if error is not None:
            fields["error"] = error
        fields["elapsed_ms"] = elapsed
        _add_stream_fields(fields, exchange)
        _completed.log(logging.INFO, fields)
    close_log_span(seconds)
    span = exchange.context.current_span()
    if isinstance(span, RequestSpan):
        _end_span(span, exchange, http_status, error_type)


def log_declined(exchange: Exchange, endpoint: str, http_status: int, error_type: str, error: str) -> None:
    """Log a request that broke a rule, or named no model that serves: it has no counters and no span."""
    if logger.isEnabledFor(logging.INFO):
        fields = {
            **_ids(exchange),
            "route": exchange.arrival.path,
            "endpoint": endpoint,
            "status": "error",
            "http_status": http_status,
            "error_type": error_type,
            "error": error,
        }
        logger.info(COMPLETED, extra=fields)


def _span_attributes(exchange: Exchange) -> dict[str, Any]:
    fields = _request_fields(exchange)
    return {
        "http.request.method": "POST",
        "http.route": fields["route"],
        _OPERATION: GEN_AI_OPERATIONS.get(fields["endpoint"], fields["endpoint"]),
        _PROVIDER: "dynamo",
        _REQUEST_MODEL: fields["model"],
        _STREAM: fields["request_type"] == "stream",
    }


def _ids(exchange: Exchange) -> dict[str, Any]:
    arrival = exchange.arrival
    ids: dict[str, Any] = {"request_id": exchange.context.id()}
    if arrival.client_request_id is not None:
        ids["x_request_id"] = arrival.client_request_id
    elif arrival.request_id_note:
        ids["x_request_id_note"] = arrival.request_id_note.strip(" ()")  # what became of the client's id
    return ids


def _request_fields(exchange: Exchange) -> dict[str, Any]:
    assert exchange.counters is not None  # it was admitted
    model, endpoint, request_type = exchange.counters.key
    return {"route": exchange.arrival.path, "model": model, "endpoint": endpoint, "request_type": request_type}


def _end_span(span: RequestSpan, exchange: Exchange, http_status: int, error_type: str) -> None:
    span.set_attribute("http.response.status_code", http_status)
    if error_type:
        span.set_attribute("error.type", error_type)
        if http_status >= 500:  # a client's mistake is not an error of the server's span
            span.set_status("error", error_type)
    tally = exchange.tally
    if tally is not None:
        span.set_attribute(_RESPONSE_ID, exchange.context.id())
        span.set_attribute(_INPUT_TOKENS, tally.prompt_tokens)
        span.set_attribute(_OUTPUT_TOKENS, tally.completion_tokens)
        if tally.cached_tokens is not None:
            span.set_attribute(_CACHED_TOKENS, tally.cached_tokens)
        if tally.finish_reason is not None:
            span.set_attribute(_FINISH_REASONS, (tally.finish_reason,))
        first = None if exchange.counters is None else exchange.counters.first_token_seconds
        if first is not None:
            span.set_attribute(_FIRST_CHUNK, first)
        for name, value in worker_fields(tally).items():
            span.set_attribute(f"dynamo.{name}", value)
    _add_parts(span, exchange.timer.seconds)
    span.finish()


def _add_stream_fields(fields: dict[str, Any], exchange: Exchange) -> None:
    """Add what came of the answer; what is not known is left out."""
    counted, work = exchange.counters, exchange.work
    assert counted is not None
    tally = None if work is None else work.tally
    tokens = 0
    if tally is not None:
        tokens = tally.completion_tokens
        fields["input_tokens"] = tally.prompt_tokens
        fields["output_tokens"] = tokens
        if (cached := tally.cached_tokens) is not None:
            fields["cached_tokens"] = cached
    if (first := counted.first_token_seconds) is not None:
        fields["ttft_ms"] = round(first * 1000, 3)
    if tally is None:
        return
    if tokens > 1:
        fields["avg_itl_ms"] = round(counted.generating_seconds / (tokens - 1) * 1000, 3)
    if tally.finish_reason is not None:
        fields["finish_reason"] = tally.finish_reason
    fields |= worker_fields(tally)
    if tally.moves:
        fields["migrations"] = len(tally.moves)


def worker_fields(tally: Tally) -> dict[str, str]:
    """Return the instances that served the request, in lower-case hex, as the logs and metrics of workers name them."""
    found: dict[str, str] = {}
    if tally.prefill_instance_id is not None:
        found["prefill_worker_id"] = f"{tally.prefill_instance_id:x}"
    if tally.instances:
        found["decode_worker_id"] = f"{tally.instances[-1].instance_id:x}"
    return found


def _add_parts(span: RequestSpan, stage_seconds: Sequence[float]) -> None:
    """Record the stages before the first token as child spans, from their sums: the stages follow each other."""
    at = time.time_ns() - int(sum(stage_seconds) * 1e9)
    spans = (  # the calls to workers, which follow, have spans of their own
        ("preprocess", sum(stage_seconds[:ROUTE])),
        ("route", stage_seconds[ROUTE]),
    )
    for name, seconds in spans:
        ended = at + int(seconds * 1e9)
        if seconds:
            span.past_child(name, at, ended)
        at = ended
