"""`/v1/embeddings`."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, Final

from dynamo.errors import Unknown
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.inputs import InputRules, check_served, encode_inputs, result_plan, vector_plan
from dynamo.frontend.pipeline.preprocess import Preprocessor
from dynamo.frontend.pipeline.result_api import ResultAnswer, ResultApi, ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.vectors.answers import embeddings_body
from dynamo.protocol.vectors.requests import EMBEDDINGS, EmbeddingRequest, check_inputs, client_body, validate_embedding
from dynamo.protocol.vectors.results import InputVectors, check_total, read_openai_embeddings, read_vectors

INLINE_VALUES: Final = 65_536  # of all vectors; more are written as JSON in a thread


class EmbeddingsApi(ResultApi[EmbeddingRequest]):
    """One vector for each input."""

    endpoint = "embeddings"
    id_prefix = "embd-"
    model_type = ModelType.Embedding

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> EmbeddingRequest:
        request: EmbeddingRequest = EMBEDDINGS.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: EmbeddingRequest) -> None:
        validate_embedding(request)

    async def plan(
        self, preprocessor: Preprocessor, request: EmbeddingRequest, model: ServedModel, timer: StageTimer
    ) -> ResultPlan:
        check_served(model, "Embeddings")
        inputs = check_inputs(request.input)
        if model.takes_text:
            return result_plan(preprocessor, request, model, [client_body(request)], 0)
        rules = InputRules(
            "input", add_special_tokens=request.add_special_tokens, truncate=request.truncate_prompt_tokens
        )
        ids = await encode_inputs(preprocessor, model, inputs, rules, timer)
        more = {"dimensions": request.dimensions, "encoding_format": request.encoding_format}
        return vector_plan(preprocessor, request, model, ids, more)

    async def render(self, offload: Offload, request: EmbeddingRequest, answer: ResultAnswer) -> ResultReply:
        count = len(check_inputs(request.input))
        takes_text = answer.model.takes_text
        found = [read_openai_embeddings(answer.results[0], count)] if takes_text else read_parts(answer)
        vectors = list(chain.from_iterable(each.items for each in found))
        check_total(vectors)
        if any(len(vector.data) != len(vectors[0].data) for vector in vectors):
            raise Unknown("the workers sent embeddings of different lengths")
        if (wanted := request.dimensions) is not None and len(vectors[0].data) != 4 * wanted:
            raise Unknown(
                f"the worker sent embeddings of {len(vectors[0].data) // 4} dimensions, {wanted} were asked for"
            )
        note_tokens(answer, found)
        write = partial(
            embeddings_body,
            vectors,
            model=request.model,
            prompt_tokens=answer.tally.prompt_tokens,
            base64=request.encoding_format == "base64",
        )
        is_short = count * len(vectors[0].data) <= 4 * INLINE_VALUES
        return ResultReply(write() if is_short else await offload(write))


def read_parts(answer: ResultAnswer) -> list[InputVectors]:
    """Return the vectors of each part. Raises Unknown for what breaks the contract."""
    parts: list[Any] = list(answer.plan.parts)
    return [read_vectors(result, len(part["token_ids"])) for part, result in zip(parts, answer.results, strict=True)]


def note_tokens(answer: ResultAnswer, found: list[InputVectors]) -> None:
    """Take over what the workers count, where all of them do."""
    counts = [each.prompt_tokens for each in found]
    if None not in counts:
        answer.tally.prompt_tokens = sum(count for count in counts if count is not None)
