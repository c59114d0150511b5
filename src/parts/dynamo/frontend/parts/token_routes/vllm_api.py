"""`/inference/v1/generate`: a request for tokens goes the way of a completion whose prompt is tokens already."""

from __future__ import annotations

from typing import Final

from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.token_routes.capable import CapableReader
from dynamo.frontend.parts.token_routes.rejections import VLLM, invalid
from dynamo.frontend.parts.token_routes.vllm_answers import VllmRenderer
from dynamo.frontend.parts.token_routes.vllm_requests import (
    LoweredGenerate,
    decode_generate,
    validate_generate,
    with_envelope,
)
from dynamo.frontend.pipeline.api import Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.generation_call import GenerationCall
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.sink import OpenAnswer
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.headers import HeaderEffects

VLLM_GENERATE: Final = "vllm_inference_v1_generate"
"""The entry of a worker's `runtime_data` that declares: its engine serves the route of tokens."""

SEVERAL: Final = "multiple models are registered; specify `model` in the request"


class VllmGenerateApi(GenerationApi[LoweredGenerate]):
    """Tokens to tokens, in vLLM's shapes."""

    endpoint = "generate"
    id_prefix = ""
    model_type = ModelType.Chat | ModelType.Completions
    dialect = VLLM
    needs_model = False

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> LoweredGenerate:
        return decode_generate(body, limits)

    def validate(self, request: LoweredGenerate) -> None:
        validate_generate(request)

    async def prepare(
        self,
        preprocessor: Preprocessor,
        request: LoweredGenerate,
        effects: HeaderEffects,
        model: ServedModel,
        timer: StageTimer,
    ) -> tuple[Plan, str | None]:
        ids, size = request.prompts()[0], model.text.vocabulary_size
        assert isinstance(ids, list)
        if size is not None and (largest := max(ids)) >= size:
            raise invalid(
                f"token_ids holds the token id {largest}, but this model's ids end at {size - 1}", "token_ids"
            )
        is_ranked = request.nvext is not None and request.nvext.dp_rank is not None
        if is_ranked and preprocessor.settings.router_mode != "kv":  # nothing else places a request at a rank
            raise invalid("Invalid request", "x-data-parallel-rank")
        plan = preprocessor.plan(request, effects, model, [ids])
        fields = with_envelope(plan.fields, request)
        return Plan(fields, plan.prompts, plan.choices, plan.pinned_instance_id, plan.limits), None

    def renderer(self, answer: Answer, options: RenderOptions) -> Renderer:
        return VllmRenderer(answer, options)


class VllmGenerateCall(GenerationCall):
    """The calls of the route."""

    def __init__(self, pipeline: Pipeline) -> None:
        api = VllmGenerateApi()
        super().__init__(api, pipeline)
        self._reader = CapableReader(api, pipeline, VLLM_GENERATE, SEVERAL)

    async def _answer(self, exchange: Exchange, resolved: Resolved, opened: OpenAnswer) -> None:
        request = resolved.request
        assert isinstance(request, LoweredGenerate)
        given = (exchange.arrival.client_request_id, request.named, exchange.context.id())
        request.answer_id = next(name for name in given if name is not None)
        await super()._answer(exchange, resolved, opened)
