"""`/inference/v1/generate`: a request for tokens goes the way of a completion whose prompt is tokens already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.token_routes.capable import CapableReader
from dynamo.frontend.parts.token_routes.rejections import VLLM, invalid
from dynamo.frontend.parts.token_routes.vllm_requests import (
    LoweredGenerate,
    decode_generate,
    validate_generate,
    with_envelope,
)
from dynamo.frontend.pipeline.api import PROMPT_LOGPROBS, Answer, GenerationApi, Renderer, RenderOptions
from dynamo.frontend.pipeline.collector import CollectedAnswer
from dynamo.frontend.pipeline.events import ChoiceOutput, Finished, Logprobs
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
from dynamo.protocol.openai.responses import token_logprobs
from dynamo.protocol.openai.sse import DONE

ROUTED_EXPERTS: Final = "routed_experts"
SAMPLING_MASK: Final = "sampling_mask"
TRANSFER: Final = "kv_transfer_params"
"""Members of an engine's `engine_data`, of the last chunk."""

LOWEST: Final = -9999.0


def no_text(token_id: int) -> str:
    """Return how a token is written where texts have no place."""
    return f"token_id:{token_id}"


def written(found: Sequence[Logprobs], alternatives: int) -> dict[str, object]:
    """Return the log probabilities of a choice; `alternatives`: how many are shown of each token, -1: all that came."""
    content: list[dict[str, object]] = []
    for each in found:
        items = token_logprobs(each.token_ids, each.log_probs, each.top_logprobs, no_text, as_token_ids=True)
        for item in items:
            shown = item.top_logprobs if alternatives < 0 else item.top_logprobs[:alternatives]
            tops = [_entry(top.token, top.logprob) for top in shown]
            content.append({**_entry(item.token, item.logprob), "top_logprobs": tops})
    return {"content": content}


def _entry(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": max(logprob, LOWEST), "bytes": list(token.encode())}


class VllmRenderer(Renderer):
    """One answer of the route."""

    def __init__(self, answer: Answer, options: RenderOptions) -> None:
        super().__init__(answer, options)
        request = answer.request
        assert isinstance(request, LoweredGenerate)
        self._id, self._alternatives = request.answer_id, request.logprobs

    def stream(self, output: ChoiceOutput) -> bytes:
        finished = next((event for event in output.events if isinstance(event, Finished)), None)
        if not output.token_ids and finished is None:
            return b""
        choice = {
            "index": output.choice,
            "logprobs": self._logprobs(
                [event for event in output.events if isinstance(event, Logprobs)], output.token_ids
            ),
            "finish_reason": None if finished is None else finished.reason,
            "token_ids": output.token_ids,
        }
        return self._event([choice], with_usage=self._options.continuous_usage)

    def splice(self) -> None:
        return None

    def end(self, *, with_usage: bool) -> bytes:
        return (self._event([], with_usage=True) if with_usage else b"") + DONE

    def routed(self, nvext: bytes) -> bytes:
        return DONE

    def _event(self, choices: Sequence[object], *, with_usage: bool) -> bytes:
        event: dict[str, object] = {"request_id": self._id, "choices": choices}
        if with_usage and (usage := self._answer.usage()) is not None:
            event["usage"] = msgspec.Raw(usage)
        return b"data: %b\n\n" % msgspec.json.encode(event)

    def collect(self, collected: CollectedAnswer) -> bytes:
        of_prompt = (collected.engine_data or {}).get(PROMPT_LOGPROBS)
        if self._answer.request.prompt_logprobs is not None and of_prompt is None:
            raise Unknown("the engine did not report the log probabilities of the prompt")
        choices = []
        for index, choice in enumerate(collected.choices):
            data: Mapping[str, object] = choice.engine_data or {}
            choices.append(
                {
                    "index": index,
                    "token_ids": choice.token_ids,
                    "logprobs": self._logprobs(choice.logprobs, choice.token_ids),
                    "finish_reason": None if choice.finished is None else choice.finished.reason,
                    ROUTED_EXPERTS: data.get(ROUTED_EXPERTS),
                    SAMPLING_MASK: data.get(SAMPLING_MASK),
                }
            )
        transfer = (collected.engine_data or {}).get(TRANSFER)
        body = {"request_id": self._id, "choices": choices, PROMPT_LOGPROBS: of_prompt, TRANSFER: transfer}
        return msgspec.json.encode(body)

    def _logprobs(self, found: Sequence[Logprobs], token_ids: Sequence[int]) -> dict[str, object] | None:
        """Return what was requested. Raises Unknown for an engine that gave none."""
        if self._alternatives is None:
            return None
        shown = written(found, self._alternatives)
        if token_ids and not shown["content"]:
            raise Unknown("the engine did not report log probabilities")
        return shown


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
