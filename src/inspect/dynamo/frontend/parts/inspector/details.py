"""One request in full: where its time went, which workers had it, what it requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.recent import EndedRequest
from dynamo.frontend.parts.inspector.routing import RoutingLog, routing_view
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.tables import Tables
from dynamo.frontend.pipeline.api import GenerationApi
from dynamo.frontend.pipeline.exchange import Exchange, FallbackStep, Phase
from dynamo.frontend.pipeline.failures import rejection_of
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.plan import Plan
from dynamo.placement import PlacementRequest
from dynamo.protocol.inspector.actions import ExplainRequest
from dynamo.protocol.inspector.views import AttemptView, CandidateView, FallbackView, RequestDetail, RoutingView
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected, model_not_found, model_not_ready
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.workers.pool import ModelPool

# Where a request would go now, and why, without sending it: nothing is booked, and no turn is used up.

_FORMS: Final = ("messages", "prompt", "token_ids")


async def explain_request(pipeline: Pipeline, asked: ExplainRequest, at_ms: int) -> list[RoutingView]:
    """Return a decision for each stage of a request, prefill before decode. Raises RequestRejected."""
    given = [name for name in _FORMS if getattr(asked, name) is not None]
    if len(given) != 1:
        raise RequestRejected(
            400, f"one of {', '.join(_FORMS)} is needed, got {', '.join(given) or 'none'}", param="messages"
        )
    model = pipeline.models.lookup(asked.model)
    if model is None:
        raise model_not_ready(asked.model) if pipeline.models.is_registered(asked.model) else model_not_found()
    try:
        body = await _worker_body(pipeline, asked, model)
        stages = [stage for stage in model.dispatcher.stages if isinstance(stage, PrefillStage)]
        found = [await _decide(stage.router.workers, body, "prefill", asked.model) for stage in stages]
        found.append(await _decide(model, body, "decode", asked.model))
    except DynamoException as error:
        raise rejection_of(error, overload_status=pipeline.settings.overload_status) from None
    for number, view in enumerate(found):
        view.id, view.at_ms = f"explain/{number}", at_ms
    return found


async def _worker_body(pipeline: Pipeline, asked: ExplainRequest, model: ServedModel) -> WorkerRequest:
    api: GenerationApi[Any] = ChatApi() if asked.messages is not None else CompletionApi()
    fields: JsonObject = {"model": asked.model}
    if asked.messages is not None:
        fields["messages"] = asked.messages
    else:
        fields["prompt"] = asked.prompt if asked.prompt is not None else asked.token_ids
    if asked.priority is not None:
        fields["nvext"] = {"agent_hints": {"priority": asked.priority}}
    settings = pipeline.settings
    limits = BodyLimits(
        settings.json_depth_limit, settings.messages_limit, settings.json_members_limit, settings.json_items_limit
    )
    request = api.decode(msgspec.json.encode(fields), ignore_unsupported=False, limits=limits)
    api.validate(request)
    plan, _ = await api.prepare(pipeline.preprocessor, request, HeaderEffects(), model, StageTimer())
    return plan.fields.for_prompt(plan.prompts[0])


async def _decide(pool: ModelPool, body: WorkerRequest, stage: str, model: str) -> RoutingView:
    kv, tokens = pool.kv, body.get("token_ids") or ()
    routing = body.get("routing") or {}
    query = None if kv is None else await kv.query(body, DispatchRecord(), pinned=None, is_prefill=stage == "prefill")
    request = PlacementRequest(
        token_ids=tokens, lora_name=routing.get("lora_name"), priority=routing.get("priority") or 0, kv=query
    )
    candidates, placement = pool.preview(request)
    view = routing_view(placement, candidates, stage=stage, model=model)
    view.prompt_tokens = len(tokens)
    known = {row.worker for row in view.candidates}
    for each in pool.listed():  # those that the choice was not made from at all
        if (name := f"{each.instance_id:x}") not in known:
            view.candidates.append(CandidateView(worker=name, running=each.in_flight, left_out="draining"))
            view.candidates_in_all += 1
    return view


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
        fallbacks=_fallbacks(clock, exchange.fallbacks),
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
        fallbacks=_fallbacks(clock, ended.fallbacks),
        token_rates=tables.token_rates.of(ended.exchange_id),
        events=tables.events.of_request(ended.exchange_id),
    )


def _fallbacks(clock: InspectorClock, steps: Sequence[FallbackStep]) -> list[FallbackView]:
    return [
        FallbackView(
            model=step.model, next_model=step.next_model, reason=step.reason, error=step.error, at_ms=clock.ms(step.at),
            workers=[worker_name(each) for each in step.workers], output_tokens=step.output_tokens,
        )
        for step in steps
    ]  # fmt: skip


def _timeline(clock: InspectorClock, times: list[float | None]) -> list[tuple[str, int, int | None]]:
    """Return the phases that a request was in, each until the next one; the last one of a request in flight lasts."""
    entered = [(name, at) for name, at in zip(_PHASES, times, strict=False) if at is not None]
    ends = [at for _, at in entered[1:]] + [times[Phase.ENDED]]
    return [
        (name, clock.ms(at), None if end is None else clock.ms(end))
        for (name, at), end in zip(entered, ends, strict=True)
    ]


def _parameters(plan: Plan) -> dict[str, object]:
    """Return what a request set, without its content."""
    sampling, stops = plan.fields.sampling_options, plan.fields.stop_conditions
    found = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    found |= {name: value for name in _STOPS if (value := getattr(stops, name)) is not None}
    if sampling.guided_decoding:
        found["guided_decoding"] = True
    if plan.options is not None and (tools := getattr(plan.options, "tools", None)):
        found["tools"] = len(tools)
    return found
