"""Where a request would go now, and why, without sending it: nothing is booked, and no turn is used up."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.apis.chat import ChatApi
from dynamo.frontend.apis.completions import CompletionApi
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.inspector.routing import routing_view
from dynamo.frontend.pipeline.api import GenerationApi
from dynamo.frontend.pipeline.failures import rejection_of
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.placement import PlacementRequest
from dynamo.protocol.inspector.actions import ExplainRequest
from dynamo.protocol.inspector.views import CandidateView, RoutingView
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected, model_not_found, model_not_ready
from dynamo.protocol.openai.headers import HeaderEffects
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.router.workers.pool import ModelPool

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
    fields: dict[str, Any] = {"model": asked.model}
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
