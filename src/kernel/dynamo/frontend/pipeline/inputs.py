"""The inputs of a request for vectors: tokenised, held against the model's limits, and shared out over requests to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Final

from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.stage_timer import PARSE, QUEUE, TOKENISE, StageTimer
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.pipeline.preprocess import (
    CHARACTERS_PER_TOKEN,
    MAX_PROMPT_TOKENS,
    PROBED_CHARACTERS,
    Preprocessor,
    least_tokens,
)
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.vectors.requests import ResultRequest, refuse
from dynamo.protocol.worker_request import PlannedRequest
from dynamo.router.dispatch.failover import DispatchLimits, pinned_instance
from dynamo.text.tokenizer import TextInput, Tokenizer

PART_INPUTS: Final = 32  # in one request to a worker
PART_TOKENS: Final = 8192
LONGEST_TOKEN: Final = 128  # characters; the end of a longer text cannot be among the first tokens that are kept


class InputRules:
    """How the inputs of one request are tokenised."""

    __slots__ = ("add_special_tokens", "field", "truncate")

    def __init__(self, field: str, *, add_special_tokens: bool | None = None, truncate: int | None = None) -> None:
        """`field`: what a refusal names. `truncate`: the most tokens that are kept, -1: as many as the model takes."""
        self.field, self.truncate = field, truncate
        self.add_special_tokens = add_special_tokens is not False


def check_served(model: ServedModel, what: str) -> None:
    """Refuse work that a model's workers cannot do in this version."""
    if model.dispatcher.stages:
        raise not_built(
            f"{what} of a model whose prompts are computed by prefill workers are not in this version", "model"
        )


async def encode_inputs(
    preprocessor: Preprocessor,
    model: ServedModel,
    inputs: Sequence[TextInput] | Sequence[list[int]],
    rules: InputRules,
    timer: StageTimer,
) -> list[list[int]]:
    """Return the token ids of each input. Raises RequestRejected (400) for one that is too long, naming it."""
    limit, field = model.length_limits.context, rules.field
    most = _most(rules, limit)
    if isinstance(inputs[0], list):
        ids: list[list[int]] = list(inputs)  # type: ignore[arg-type]  # all are of the first one's kind
        _check_ids(ids, model, field)
        if most is not None:
            ids = [each[:most] for each in ids]
    else:
        ids = await _tokenised(preprocessor.offload, model, inputs, rules, most, timer)  # type: ignore[arg-type]
    for position, each in enumerate(ids):
        if limit is not None and len(each) > limit:
            raise _too_long(limit, str(len(each)), field, position, len(ids))
        if not each:
            refuse(f"{field.capitalize()}[{position}] has no tokens", f"{field}[{position}]")
    total, most_total = sum(map(len, ids)), preprocessor.settings.embedding_tokens_limit
    if total > most_total:
        raise RequestRejected(
            400,
            f"Validation: {field} has {total} tokens in all, at most {most_total} are taken in one request "
            "(DYN_HTTP_EMBEDDING_TOKENS_LIMIT)",
            param=field,
            limit="embedding_tokens",
        )
    return ids


def input_groups(ids: Sequence[Sequence[int]]) -> list[range]:
    """Share inputs out over requests to workers: so many, and so many tokens, in each; return the places of each."""
    groups, begin, tokens = [], 0, 0
    for place, each in enumerate(ids):
        if place > begin and (place - begin == PART_INPUTS or tokens + len(each) > PART_TOKENS):
            groups.append(range(begin, place))
            begin, tokens = place, 0
        tokens += len(each)
    groups.append(range(begin, len(ids)))
    return groups


def vector_plan(
    preprocessor: Preprocessor,
    request: ResultRequest,
    model: ServedModel,
    ids: Sequence[list[int]],
    more: Mapping[str, object],
) -> ResultPlan:
    """Return the plan for inputs; `more` are further members of each request to a worker."""
    routing = routing_of(request, model)
    body = {"model": request.model, "mdc_sum": model.mdc_sum, "annotations": [], "routing": routing, **more}
    parts = [{**body, "token_ids": [ids[place] for place in group]} for group in input_groups(ids)]
    return result_plan(preprocessor, request, model, parts, sum(map(len, ids)))


def result_plan(
    preprocessor: Preprocessor,
    request: ResultRequest,
    model: ServedModel,
    parts: Sequence[Mapping[str, object]],
    tokens: int,
) -> ResultPlan:
    """Return the plan of parts, which go where the request may go."""
    settings = preprocessor.settings
    limits = DispatchLimits.of(
        tokens,
        retries=settings.migration_limit,
        longest_movable_tokens=None,
        card_retries=model.card.migration_limit,
    )
    routing = routing_of(request, model)
    pinned = pinned_instance(routing) if routing else None  # type: ignore[arg-type]  # a plain dict of its members
    if pinned is None and settings.router_mode == "direct":
        refuse("The router mode is direct: name a worker (nvext.backend_instance_id)", "nvext")
    return ResultPlan(PlannedRequest(), [[]], 1, pinned, limits, parts=parts, input_tokens=tokens)


def routing_of(request: ResultRequest, model: ServedModel) -> dict[str, object]:
    """Return what a worker and the way to it may know of where the request goes."""
    routing: dict[str, object] = {}
    if (nvext := request.nvext) is not None:
        for name in ("backend_instance_id", "dp_rank"):
            if (value := getattr(nvext, name)) is not None:
                routing[name] = value
    salt = (nvext.cache_salt if nvext is not None else None) or getattr(request, "cache_salt", None)
    if request.cache_owner is not None:
        salt = f"{request.cache_owner}\n{salt or ''}"
    if salt:
        routing["cache_salt"] = salt
    if (priority := getattr(request, "priority", None)) is not None:
        routing["priority"] = priority
    if model.lora_name is not None:
        routing["lora_name"] = model.lora_name
    return routing


async def _tokenised(
    offload: Offload,
    model: ServedModel,
    inputs: Sequence[TextInput],
    rules: InputRules,
    most: int | None,
    timer: StageTimer,
) -> list[list[int]]:
    tokenizer = model.text.tokenizer
    limit = model.length_limits.context or MAX_PROMPT_TOKENS
    if most is not None:
        inputs = [_shortened(text, most * LONGEST_TOKEN) for text in inputs]
    characters = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in inputs]
    timer.mark(PARSE)
    for position, count in enumerate(characters):
        if most is None and count > max(PROBED_CHARACTERS, CHARACTERS_PER_TOKEN * limit):
            least = await offload(partial(_least, tokenizer, inputs[position], limit))
            if least > limit:
                raise _too_long(limit, f"at least {least}", rules.field, position, len(inputs))
    encode = partial(tokenizer.encode_inputs, inputs, add_special_tokens=rules.add_special_tokens, most_tokens=most)
    if sum(characters) <= PROBED_CHARACTERS:
        ids = encode()
    else:
        started, ids = await offload(lambda: (perf_counter(), encode()))
        timer.mark_until(QUEUE, started)
    timer.mark(TOKENISE)
    return ids


def _least(tokenizer: Tokenizer, text: TextInput, limit: int) -> int:
    return least_tokens(tokenizer, text if isinstance(text, str) else "".join(text), limit + 1)


def _shortened(text: TextInput, most_characters: int) -> TextInput:
    if isinstance(text, str):
        return text[:most_characters]
    return text[0][:most_characters], text[1][:most_characters]


def _most(rules: InputRules, limit: int | None) -> int | None:
    """Return the most tokens that are kept of an input; None: all of them."""
    if rules.truncate is None:
        return None
    if rules.truncate == -1:
        return limit
    if limit is not None and rules.truncate > limit:
        refuse(
            f"Truncate_prompt_tokens must be at most {limit}, the model's context length, got {rules.truncate}",
            "truncate_prompt_tokens",
        )
    return rules.truncate


def _check_ids(ids: Sequence[Sequence[int]], model: ServedModel, field: str) -> None:
    size = model.text.vocabulary_size
    if size is None:
        return
    for position, each in enumerate(ids):
        if (largest := max(each)) >= size:
            refuse(
                f"{field.capitalize()}[{position}] holds the token id {largest}, but this model's ids end at {size - 1}",
                f"{field}[{position}]",
            )


def _too_long(limit: int, found: str, field: str, position: int, inputs: int) -> RequestRejected:
    where = field if inputs == 1 else f"{field}[{position}]"
    return RequestRejected(
        400,
        f"This model's maximum context length is {limit} tokens. However, {where} has {found} tokens. Please shorten it, or "
        "send truncate_prompt_tokens.",
        param=where,
        code="context_length_exceeded",
    )
