"""`/v1/classify` and `/v1/pooling`: what the head of a model yields for each input."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import chain

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.apis.embeddings import INLINE_VALUES, note_tokens, read_parts
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.inputs import InputRules, check_served, encode_inputs, result_plan, vector_plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.result_api import ResultAnswer, ResultApi, ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.records import LABELS
from dynamo.protocol.vectors.answers import classes_body, pooling_body, result_head
from dynamo.protocol.vectors.requests import (
    CLASSIFY,
    POOLING,
    ClassifyRequest,
    PoolingRequest,
    VectorRequest,
    check_inputs,
    client_body,
    validate_classify,
    validate_pooling,
)
from dynamo.protocol.vectors.results import InputVector, check_total


def labels_of(model: ServedModel) -> list[str]:
    """Return the names of a model's classes; [] where its workers declare none."""
    found = model.card.runtime_config.runtime_data.get(LABELS)
    return [str(name) for name in found] if isinstance(found, list) else []


class ClassifyApi(ResultApi[ClassifyRequest]):
    """The classes of each input, with their probabilities."""

    endpoint = "classify"
    id_prefix = "classify-"
    model_type = ModelType.Classify

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ClassifyRequest:
        request: ClassifyRequest = CLASSIFY.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: ClassifyRequest) -> None:
        validate_classify(request)

    async def plan(
        self, preprocessor: Preprocessor, request: ClassifyRequest, model: ServedModel, timer: StageTimer
    ) -> ResultPlan:
        more = {"task": "classify", "use_activation": request.use_activation}
        return await _plan(preprocessor, request, model, timer, more)

    async def render(self, offload: Offload, request: ClassifyRequest, answer: ResultAnswer) -> ResultReply:
        if answer.model.takes_text:
            return _own_object(request, answer)
        vectors = _vectors(answer)
        labels = labels_of(answer.model)
        if any(vector.shape is not None for vector in vectors):
            raise Unknown("the worker sent classes for each token, and not for each input")
        head = result_head(answer.id, int(time.time()), request.model)
        return ResultReply(classes_body(head, vectors, labels, prompt_tokens=answer.tally.prompt_tokens))


class PoolingApi(ResultApi[PoolingRequest]):
    """What the model's pooling makes of each input, as it is."""

    endpoint = "pooling"
    id_prefix = "pool-"
    model_type = ModelType.Pooling

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> PoolingRequest:
        request: PoolingRequest = POOLING.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: PoolingRequest) -> None:
        validate_pooling(request)

    async def plan(
        self, preprocessor: Preprocessor, request: PoolingRequest, model: ServedModel, timer: StageTimer
    ) -> ResultPlan:
        task = request.task or ("classify" if labels_of(model) else "embed")
        more = {
            "task": task,
            "use_activation": request.use_activation,
            "normalize": request.normalize,
            "encoding_format": request.encoding_format or "float",
        }
        return await _plan(preprocessor, request, model, timer, more)

    async def render(self, offload: Offload, request: PoolingRequest, answer: ResultAnswer) -> ResultReply:
        if answer.model.takes_text:
            return _own_object(request, answer)
        vectors = _vectors(answer)
        write = partial(
            pooling_body,
            result_head(answer.id, int(time.time()), request.model),
            vectors,
            prompt_tokens=answer.tally.prompt_tokens,
            base64=request.encoding_format == "base64",
        )
        is_short = sum(len(vector.data) for vector in vectors) <= 4 * INLINE_VALUES
        return ResultReply(write() if is_short else await offload(write))


async def _plan(
    preprocessor: Preprocessor,
    request: VectorRequest,
    model: ServedModel,
    timer: StageTimer,
    more: Mapping[str, object],
) -> ResultPlan:
    check_served(model, "Vectors")
    inputs = check_inputs(request.input)
    if model.takes_text:
        return result_plan(preprocessor, request, model, [client_body(request)], 0)
    rules = InputRules("input", add_special_tokens=request.add_special_tokens, truncate=request.truncate_prompt_tokens)
    ids = await encode_inputs(preprocessor, model, inputs, rules, timer)
    return vector_plan(preprocessor, request, model, ids, more)


def _vectors(answer: ResultAnswer) -> list[InputVector]:
    found = read_parts(answer)
    vectors = list(chain.from_iterable(each.items for each in found))
    check_total(vectors)
    note_tokens(answer, found)
    return vectors


def _own_object(request: VectorRequest, answer: ResultAnswer) -> ResultReply:
    """Return the object of a worker that takes text as it is. Raises Unknown where it does not fit the request."""
    found, count = answer.results[0], len(check_inputs(request.input))
    data = found.get("data") if isinstance(found, Mapping) else None
    if not isinstance(data, list) or len(data) != count:
        raise Unknown(f"the worker did not answer {count} inputs with a list of `data` of that length")
    return ResultReply(msgspec.json.encode(found))
