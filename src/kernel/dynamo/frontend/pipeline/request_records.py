"""What the metrics, the log and the trace keep of one request of the frontend: its listeners, and the records that they write."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final, cast

from dynamo.errors import Disconnected, DynamoException, EngineShutdown, NoReplacement
from dynamo.frontend.admission.model import Shed
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.metrics.requests import UNKNOWN_MODEL, RequestMetrics
from dynamo.frontend.base.stage_timer import ROUTE
from dynamo.frontend.pipeline.exchange import Exchange, FrontendStopping, tried_models
from dynamo.frontend.pipeline.gen_ai import GenAi, content_attributes, output_messages, request_attributes
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.plan import Tally
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.router.kv.explain import ExplainedChoice, explain_placement
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_log import COMPLETED, RECEIVED
from dynamo.runtime.observe.log_records import LogSite
from dynamo.runtime.observe.logging import close_log_span, enter_log_span, request_level
from dynamo.runtime.observe.tracing import RequestSpan, exports_content, is_tracing, start_server_span

logger = logging.getLogger(__name__)

_completed: Final = LogSite(logger, COMPLETED, "end_record")

SENT: Final = "http response sent"
SPAN: Final = "http-request"
_KEEP_ONE: Final = "keep a second one running, or start the next one before the last is stopped"
MAX_CANDIDATES: Final = 16  # of a routing decision that a span names, the cheapest ones


def begin_record(exchange: Exchange, request: object, effects: HeaderEffects) -> None:
    """Log an admitted request, open its server span, and name it in the task's further records."""
    context, ids, span = exchange.context, _ids(exchange), None
    if is_tracing():
        attributes = _span_attributes(exchange, request, effects)
        span = start_server_span(context, f"POST {exchange.arrival.path}", attributes)
    _trace_ids(ids, context, span)
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
        fields["status"] = "error" if error_type else "success"
        fields["http_status"] = http_status
        if level == logging.INFO or logger.isEnabledFor(level):
            logger.log(level, SENT, extra={**fields, "latency_ms": elapsed})
        if error_type:
            fields["error_type"] = error_type
        if error is not None:
            fields["error"] = error
        fields["elapsed_ms"] = elapsed
        if steps := exchange.early_end.fallbacks:
            fields["served_by"], fields["tried"] = steps[-1].next_model, tried_models(steps)
        _add_stream_fields(fields, exchange)
        _completed.log(logging.INFO, fields)
    close_log_span(seconds)
    span = exchange.context.current_span()
    if isinstance(span, RequestSpan):
        _end_span(span, exchange, http_status, error_type)


def record_declined(exchange: Exchange, outcome: Outcome, error: str) -> None:
    """Log a request that broke a rule, or named no model that serves, and trace it; it has no counters of a model."""
    context, ids, arrival = exchange.context, _ids(exchange), exchange.arrival
    seconds, status, level = outcome.at - arrival.at, outcome.status, request_level()
    span = None
    if is_tracing():
        attributes = {"http.request.method": "POST", "http.route": arrival.path, **_server(exchange)}
        span = start_server_span(context, f"POST {arrival.path}", attributes)
    _trace_ids(ids, context, span)
    enter_log_span(SPAN, ids)
    fields: dict[str, object] = {"route": arrival.path, "endpoint": outcome.endpoint}
    if logger.isEnabledFor(level):
        logger.log(level, RECEIVED, extra=fields)
    fields |= {"status": "error", "http_status": status}
    elapsed = round(seconds * 1000, 3)
    if logger.isEnabledFor(level):
        logger.log(level, SENT, extra={**fields, "latency_ms": elapsed})
    fields |= {"error_type": outcome.error_type, "error": error, "elapsed_ms": elapsed}
    logger.info(COMPLETED, extra=fields)
    close_log_span(seconds)
    if span is not None:
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("error.type", outcome.error_type)
        span.finish()


def _trace_ids(ids: dict[str, object], context: Context, span: RequestSpan | None) -> None:
    """Add the ids of the trace of a request, where it has one, and of its span."""
    if span is not None:
        ids |= {"trace_id": context.trace_id, "span_id": span.span_id}
    if (trace := context.trace) is not None:
        ids |= {"trace_id": context.trace_id, "parent_id": trace.span_id}


def _span_attributes(exchange: Exchange, request: object, effects: HeaderEffects) -> dict[str, object]:
    assert exchange.counters is not None  # it was admitted
    model, endpoint, request_type = exchange.counters.key
    found = request_attributes(endpoint, model, request, effects, is_stream=request_type == "stream")
    found |= {"http.request.method": "POST", "http.route": exchange.arrival.path, **_server(exchange)}
    return found | content_attributes(request) if exports_content() else found


def _server(exchange: Exchange) -> dict[str, object]:
    """Return where the request came in, as its client calls it."""
    host, _, port = exchange.arrival.headers.get(b"host", b"").decode("latin-1").rpartition(":")
    if not port.isdecimal():
        return {"server.address": f"{host}:{port}".strip(":")[:255]} if host or port else {}
    return {"server.address": host[:255], "server.port": int(port[:5])}


def _ids(exchange: Exchange) -> dict[str, object]:
    arrival = exchange.arrival
    ids: dict[str, object] = {"request_id": exchange.context.id(), "response_id": exchange.response_id}
    if arrival.client_request_id is not None:
        ids["x_request_id"] = arrival.client_request_id
    elif arrival.request_id_note:
        ids["x_request_id_note"] = arrival.request_id_note.strip(" ()")  # what became of the client's id
    return ids


def _request_fields(exchange: Exchange) -> dict[str, object]:
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
        span.set_attribute(GenAi.RESPONSE_ID, exchange.response_id)
        span.set_attribute(GenAi.INPUT_TOKENS, tally.prompt_tokens)
        span.set_attribute(GenAi.OUTPUT_TOKENS, tally.completion_tokens)
        if tally.cached_tokens is not None:
            span.set_attribute(GenAi.CACHED_TOKENS, tally.cached_tokens)
        if tally.finish_reason is not None:
            span.set_attribute(GenAi.FINISH_REASONS, (tally.finish_reason,))
        first = None if exchange.counters is None else exchange.counters.first_token_seconds
        if first is not None:
            span.set_attribute(GenAi.FIRST_CHUNK, first)
        if tally.reasoning_tokens is not None:
            span.set_attribute(GenAi.REASONING_TOKENS, tally.reasoning_tokens)
        if tally.image_tokens:
            span.set_attribute(GenAi.IMAGE_TOKENS, tally.image_tokens)
        if (model := exchange.served_model) is not None:
            span.set_attribute(GenAi.RESPONSE_MODEL, model)
        if exchange.fallbacks:
            span.set_attribute("dynamo.fallback.tried", tried_models(exchange.fallbacks))
        for name, value in worker_fields(tally).items():
            span.set_attribute(f"dynamo.{name}", value)
        tap = None if exchange.work is None else exchange.work.tap
        if tap is not None and exports_content() and (messages := output_messages(tap.folded())):
            span.set_attribute(GenAi.OUTPUT_MESSAGES, messages)
    _add_parts(span, exchange.timer.seconds, {} if tally is None else _route_attributes(tally))
    span.finish()


def _add_stream_fields(fields: dict[str, object], exchange: Exchange) -> None:
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


def _route_attributes(tally: Tally) -> dict[str, object]:
    """Return the last choice of a worker, with its reasons."""
    if tally.placement is None:
        return {}
    explained = explain_placement(tally.placement)
    found: dict[str, object] = {
        "dynamo.route.policy": explained["policy"],
        "dynamo.route.worker_id": f"{explained['worker_id']:x}",
        "dynamo.route.summary": explained["summary"],
        "dynamo.route.attempts": len(tally.failed_attempts) + 1,
    }
    if "candidates" in explained:  # the kv mode: what each candidate would have cost
        choice = cast(ExplainedChoice, explained)
        kept = choice["candidates"][:MAX_CANDIDATES]
        found["dynamo.route.candidates"] = tuple(
            [f"{each['worker']} {each['cost']:g} {choice['unit']}" for each in kept]
        )
        found["dynamo.route.candidate_count"] = choice["candidates_in_all"]
    return found


def _add_parts(span: RequestSpan, stage_seconds: Sequence[float], route: Mapping[str, object]) -> None:
    """Record the stages before the first token as child spans, from their sums: the stages follow each other."""
    at = time.time_ns() - int(sum(stage_seconds) * 1e9)
    spans: tuple[
        tuple[str, float, Mapping[str, object]], ...
    ] = (  # the calls to workers, which follow, have spans of their own
        ("preprocess", sum(stage_seconds[:ROUTE]), {}),
        ("route", stage_seconds[ROUTE], route),
    )
    for name, seconds, attributes in spans:
        ended = at + int(seconds * 1e9)
        if seconds:
            span.past_child(name, at, ended, attributes)
        at = ended


def _judged(outcome: Outcome) -> tuple[int, str]:
    """Return the level of the line about a failed request, and what it names for an operator to do."""
    match outcome.why:
        case FrontendStopping():
            return logging.INFO, ""
        case (
            EngineShutdown() | NoReplacement()
        ):  # a planned stop, most of all; a worker that failed has an ERROR of its own
            return logging.WARNING, f"; no other worker went on with it; {_KEEP_ONE}"
        case Disconnected() if outcome.instances:
            return logging.ERROR, f"; the log of worker {outcome.instances[-1].instance_id:x} has why it ended"
    return logging.ERROR, ""


class RequestCounts(RequestListener):
    """Counts each request, and what its answer shows of the worker that made it."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        requests, counters, usage = self._metrics.requests, exchange.counters, outcome.usage
        if outcome.is_answered:
            if counters is None:
                requests.counted(exchange.model or UNKNOWN_MODEL, outcome.endpoint)
            else:
                counters.finish(
                    outcome.at,
                    prompt_tokens=usage.prompt_tokens,
                    output_tokens=usage.output_tokens,
                    cached_tokens=usage.cached_tokens,
                )
                requests.stages.observe(exchange.timer)
                self._note_pace(counters, outcome)
        elif outcome.failure is not None:
            if counters is None:
                counters = requests.begin(UNKNOWN_MODEL, outcome.endpoint, "unary", exchange.arrival.at)
                if outcome.rejected is not None and outcome.rejected.limit is not None:
                    self._metrics.refused(outcome.rejected.limit)
            elif isinstance(outcome.why, Shed) and exchange.model is not None:
                requests.shed(exchange.model, outcome.why.reason)
            counters.fail(
                outcome.at,
                **outcome.failure._asdict(),
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.output_tokens,
            )
        elif counters is not None:  # else its client left before anything was counted of it
            counters.cancel(outcome.at, prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens)
        if outcome.moves and exchange.model is not None:
            requests.moved(exchange.model, outcome.moves)

    def _note_pace(self, counters: RequestMetrics, outcome: Outcome) -> None:
        """Learn how quick the worker is that answered."""
        first, usage = counters.first_token_seconds, outcome.usage
        if outcome.instances and first is not None and usage.output_tokens:
            gaps = usage.output_tokens - 1 if usage.output_tokens > 1 else 1
            pace = counters.generating_seconds / gaps
            worker_id = outcome.instances[-1].instance_id
            self._metrics.workers.answered(worker_id, first, usage.prompt_tokens, pace)


class RequestLog(RequestListener):
    """Logs the end of each request, and ends its span.

    What was turned away for lack of room has no line: it must cost next to nothing.
    """

    def __init__(self, overload_status: int) -> None:
        """`overload_status`: of answers that are no failure of the frontend, whatever it is."""
        self._overload_status = overload_status

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        why, status = outcome.why, outcome.status
        if why is not None and not isinstance(why, DynamoException | RequestRejected):
            logger.error("request %s failed inside the frontend", exchange.name, exc_info=why)
        elif outcome.reached is Reached.ADMITTED and status >= 500 and status != self._overload_status:
            level, next_step = _judged(outcome)
            kind = type(why).__name__
            logger.log(level, "request %s failed with %d: %s: %s%s", exchange.name, status, kind, why, next_step)
        if outcome.reached is Reached.ADMITTED:
            if exchange.counters is not None:
                end_record(exchange, outcome.at, status, outcome.error_type, outcome.message)
        elif outcome.reached is Reached.READ and outcome.rejected is not None:
            record_declined(exchange, outcome, outcome.rejected.message)
