"""One request in full: where its time went, which workers had it, what it requested."""

from __future__ import annotations

from typing import Any, Final

from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.recent import EndedRequest
from dynamo.frontend.parts.inspector.routing import RoutingLog
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.tables import Tables
from dynamo.frontend.pipeline.exchange import Exchange, Phase
from dynamo.frontend.pipeline.plan import Plan
from dynamo.protocol.inspector.views import AttemptView, RequestDetail

_PHASES: Final = ("admitted", "preprocess", "route", "prefill", "decode")
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_STOPS: Final = ("max_tokens", "min_tokens", "ignore_eos")


def request_detail(
    tables: Tables, clock: InspectorClock, id: str, *, with_content: bool = False
) -> RequestDetail | None:
    """Return what is still known of a request; None: nothing is. `with_content`: with its texts, while it runs."""
    routing, exchange = tables.routing, tables.streams.find(id)
    if exchange is not None:
        detail = _running(tables, routing, clock, exchange)
        if with_content:
            detail.content = tables.contents.read(exchange)
        return detail
    ended = tables.recent.find(id)
    return None if ended is None else _ended(tables, routing, clock, ended)


def _running(tables: Tables, routing: RoutingLog, clock: InspectorClock, exchange: Exchange) -> RequestDetail:
    id, tally, work = exchange.response_id, exchange.tally, exchange.work
    detail = RequestDetail(
        stream=tables.streams.row(exchange),
        timeline=_timeline(clock, exchange.phase_times),
        routing=routing.of_request(id, tally),
        events=tables.events.of_request(id),
    )
    if work is not None:
        made = sum(stream.tokens for stream in work.running)
        detail.token_rates = tables.token_rates.look(id, made, clock.now())
    for decision in detail.routing:
        if not decision.model:  # from the record of the request, which holds neither its model nor the time
            decision.model = (detail.stream.model if detail.stream else None) or ""
            decision.at_ms = clock.ms(exchange.phase_times[Phase.DISPATCHED] or exchange.arrival.at)
    if work is not None and tally is not None:
        detail.parameters = _parameters(work.plan)
        detail.attempt_limit = work.plan.limits.retries + 1
        failed = [
            AttemptView(
                number=number,
                worker=worker_name(each.placement.candidate.instance_id),
                at_ms=clock.ms(each.at),
                outcome=f"{each.stage} failed: {each.error_kind}",
                output_tokens=each.tokens,
            )
            for number, each in enumerate(tally.failed_attempts, 1)
        ]
        detail.attempts = failed
        if work.running and (instance_id := work.running[0].instance_id) is not None:
            at = exchange.phase_times[Phase.DISPATCHED] or exchange.arrival.at
            began = tally.failed_attempts[-1].at if tally.failed_attempts else at
            detail.attempts.append(
                AttemptView(
                    number=len(failed) + 1,
                    worker=worker_name(instance_id),
                    at_ms=clock.ms(began),
                    outcome="running",
                    output_tokens=sum(stream.tokens for stream in work.running),
                )
            )
    return detail


def _ended(tables: Tables, routing: RoutingLog, clock: InspectorClock, ended: EndedRequest) -> RequestDetail:
    row = tables.recent.row(ended)
    return RequestDetail(
        recent=row,
        timeline=_timeline(clock, ended.phase_times),
        routing=routing.of_request(ended.exchange_id, None),
        token_rates=tables.token_rates.of(ended.exchange_id),
        events=tables.events.of_request(ended.exchange_id),
    )


def _timeline(clock: InspectorClock, times: list[float | None]) -> list[tuple[str, int, int | None]]:
    """Return the phases that a request was in, each until the next one; the last one of a request in flight lasts."""
    entered = [(name, at) for name, at in zip(_PHASES, times, strict=False) if at is not None]
    ends = [at for _, at in entered[1:]] + [times[Phase.ENDED]]
    return [
        (name, clock.ms(at), None if end is None else clock.ms(end))
        for (name, at), end in zip(entered, ends, strict=True)
    ]


def _parameters(plan: Plan) -> dict[str, Any]:
    """Return what a request set, without its content."""
    sampling, stops = plan.fields.sampling_options, plan.fields.stop_conditions
    found = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    found |= {name: value for name in _STOPS if (value := getattr(stops, name)) is not None}
    if sampling.guided_decoding:
        found["guided_decoding"] = True
    if plan.options is not None and (tools := getattr(plan.options, "tools", None)):
        found["tools"] = len(tools)
    return found
