"""The APIs of vectors: `/v1/embeddings`, `/v1/classify`, `/v1/pooling`, `/v1/score`, and reranking in its two shapes."""

from __future__ import annotations

import math
import operator
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec

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
from dynamo.protocol.records import LABELS
from dynamo.protocol.vectors.answers import (
    classes_body,
    embeddings_body,
    pooling_body,
    ranked_list,
    ranked_results,
    result_head,
    scores_body,
)
from dynamo.protocol.vectors.requests import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
    check_inputs,
    client_body,
    validate_classify,
    validate_embedding,
    validate_pooling,
    validate_rerank,
    validate_score,
)
from dynamo.protocol.vectors.results import InputVector, InputVectors, check_total, read_openai_embeddings, read_vectors

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


# `/v1/classify` and `/v1/pooling`: what the head of a model yields for each input.


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


# `/v1/score`, and reranking in its two shapes: how well pairs of texts fit.
#
# A model with one class judges both texts together (a cross encoder). Any other model makes a vector of each text, and the score
# is the cosine between them.

R = TypeVar("R", bound=Any)


class _PairApi(ResultApi[R]):
    """Scores pairs of texts."""

    model_type = ModelType.Rerank | ModelType.Embedding

    async def plan(self, preprocessor: Preprocessor, request: R, model: ServedModel, timer: StageTimer) -> ResultPlan:
        check_served(model, "Scores")
        if model.takes_text:
            return result_plan(preprocessor, request, model, [client_body(request)], 0)
        rules = InputRules(self._field, truncate=request.truncate_prompt_tokens)
        if _judges_pairs(model):
            ids = await encode_inputs(preprocessor, model, request.pairs(), rules, timer)
            return vector_plan(preprocessor, request, model, ids, {"task": "score"})
        texts = list(dict.fromkeys(chain.from_iterable(request.pairs())))  # each is embedded once
        ids = await encode_inputs(preprocessor, model, texts, rules, timer)
        return vector_plan(preprocessor, request, model, ids, {"task": "embed"})

    @property
    @abstractmethod
    def _field(self) -> str:
        """The member that a refusal names."""

    async def _scores(self, offload: Offload, request: R, answer: ResultAnswer) -> list[float]:
        found = read_parts(answer)
        vectors = list(chain.from_iterable(each.items for each in found))
        check_total(vectors)
        note_tokens(answer, found)
        if _judges_pairs(answer.model):
            scores = [vector.floats() for vector in vectors]
            if any(len(score) != 1 for score in scores):
                raise Unknown("the worker sent more than one number for a pair of texts")
            return [score[0] for score in scores]
        return await offload(partial(_cosines, request.pairs(), vectors))


class ScoreApi(_PairApi[ScoreRequest]):
    """vLLM's score."""

    endpoint = "score"
    id_prefix = "score-"
    _field = "text_2"

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ScoreRequest:
        request: ScoreRequest = SCORE.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: ScoreRequest) -> None:
        validate_score(request)

    async def render(self, offload: Offload, request: ScoreRequest, answer: ResultAnswer) -> ResultReply:
        if answer.model.takes_text:
            scores = [_number(entry, "score") for entry in _entries(answer, "data", len(request.pairs()))]
        else:
            scores = await self._scores(offload, request, answer)
        head = result_head(answer.id, int(time.time()), request.model)
        return ResultReply(scores_body(head, scores, prompt_tokens=answer.tally.prompt_tokens))


class RerankApi(_PairApi[RerankRequest]):
    """Documents by how well they answer a query, the best first."""

    endpoint = "rerank"
    id_prefix = "rerank-"
    _field = "documents"

    def __init__(self, *, is_list: bool) -> None:
        """`is_list`: the answer is the bare list of 1.6.1, and not the object of Jina, Cohere and vLLM."""
        self._is_list = is_list

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> RerankRequest:
        request: RerankRequest = RERANK.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: RerankRequest) -> None:
        validate_rerank(request)

    async def render(self, offload: Offload, request: RerankRequest, answer: ResultAnswer) -> ResultReply:
        count = len(request.documents)
        if answer.model.takes_text:
            scores = _placed(_ranked_entries(answer), count, request.top_n)
        else:
            scores = dict(enumerate(await self._scores(offload, request, answer)))
        ranked = sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))[: request.top_n]
        texts = None if request.return_documents is False else request.texts
        if self._is_list:
            return ResultReply(ranked_list(ranked, texts))
        tokens = answer.tally.prompt_tokens
        return ResultReply(ranked_results(answer.id, request.model, ranked, texts, prompt_tokens=tokens))


def _judges_pairs(model: ServedModel) -> bool:
    return len(labels_of(model)) == 1


def _cosines(pairs: Sequence[tuple[str, str]], vectors: Sequence[InputVector]) -> list[float]:
    texts = list(dict.fromkeys(chain.from_iterable(pairs)))
    values = {text: vector.floats() for text, vector in zip(texts, vectors, strict=True)}
    if len({len(each) for each in values.values()}) > 1:
        raise Unknown("the workers sent embeddings of different lengths")
    norms = {text: math.sqrt(sum(map(operator.mul, each, each))) for text, each in values.items()}
    return [
        sum(map(operator.mul, values[first], values[second])) / ((norms[first] * norms[second]) or 1.0)
        for first, second in pairs
    ]


def _entries(answer: ResultAnswer, member: str, count: int) -> list[object]:
    found = answer.results[0]
    entries = found.get(member) if isinstance(found, Mapping) else None
    if not isinstance(entries, list) or len(entries) != count:
        raise Unknown(f"the worker did not answer with a list of `{member}` of length {count}")
    return entries


def _ranked_entries(answer: ResultAnswer) -> list[object]:
    """Return the list of a worker that reranks by itself, bare or as `results`."""
    found = answer.results[0]
    entries = found.get("results") if isinstance(found, Mapping) else found
    if not isinstance(entries, list):
        raise Unknown("the worker did not answer a request for a ranking with a list")
    return entries


def _placed(entries: Sequence[Any], count: int, top_n: int | None) -> dict[int, float]:
    """Return the score of each document. Raises Unknown for a document that is not there, or there twice."""
    scores: dict[int, float] = {}
    for entry in entries:
        index = entry.get("index") if isinstance(entry, Mapping) else None
        if type(index) is not int or not 0 <= index < count or index in scores:
            raise Unknown(f"the worker ranked the document {index!r} of {count}")
        scores[index] = _number(entry, "score" if "score" in entry else "relevance_score")
    if len(scores) < min(count, top_n or count):
        raise Unknown(f"the worker ranked {len(scores)} of {count} documents")
    return scores


def _number(entry: object, member: str) -> float:
    value = entry.get(member) if isinstance(entry, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Unknown(f"the worker sent the `{member}` {value!r}")
    return float(value)
