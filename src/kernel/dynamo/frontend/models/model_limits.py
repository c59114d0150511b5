"""What a model takes: prompts and answers of some length, the token ids it has, the ranks of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import CommonRequest, CompletionRequest
from dynamo.protocol.records import ModelCard
from dynamo.protocol.worker_request import StopFields


class LengthLimits(NamedTuple):
    """How long the prompt and the answer of a model may be, in tokens."""

    context: int | None  # of prompt and answer together, as the model has it; None: the worker did not report it
    prompt: int | None  # a prompt has fewer; None: the worker did not report it
    combined: int | None = None  # of prompt and answer together, where a budget of the worker's sets it
    rejects_total: bool = False  # what is requested beyond `combined` is refused, and not cut by the engine

    @classmethod
    def of(cls, card: ModelCard, context_length: int | None) -> LengthLimits:
        """Read the limits from a model's card. `context_length`: of the model, from wherever it is known."""
        budget = card.runtime_config.runtime_data.get("token_budget")
        combined = budget.get("combined_limit") if isinstance(budget, dict) else None
        if not isinstance(budget, dict) or not isinstance(combined, int):
            return cls(context_length, context_length)
        limit = context_length
        limit = combined if limit is None or budget.get("reject_prompt_overflow") else min(limit, combined)
        return cls(context_length, limit, combined, bool(budget.get("reject_total_overflow")))

    def check(self, prompts: Sequence[list[int]], *, is_chat: bool) -> None:
        """Refuse a prompt that cannot fit, before a worker is bothered."""
        longest = max(map(len, prompts), default=0)
        if self.prompt is not None and longest >= self.prompt:
            raise PromptTooLong(self.prompt, str(longest), is_chat=is_chat)

    def cut(self, ids: list[int], count: int, answer: int | None) -> list[int]:
        """Return the last `count` tokens of a prompt; with -1 as many as leave room for the `answer`."""
        if count == -1:
            if self.prompt is None:
                return ids
            count = max(1, self.prompt - max(1, answer or 1))
        return ids[-count:]

    def clamp(self, stops: StopFields, prompt_tokens: int) -> None:
        """Cut the token limit of a request to what the model has left behind the prompt."""
        limits = [limit for limit in (self.context, self.combined) if limit is not None]
        if limits and stops.max_tokens is not None:
            stops.max_tokens = max(1, min(stops.max_tokens, min(limits) - prompt_tokens))

    def fill_in(self, stops: StopFields, prompts: Sequence[list[int]], *, is_chat: bool) -> None:
        """Check or set the token limit of a request to a model with a budget."""
        combined = self.combined
        assert combined is not None
        longest = max(map(len, prompts), default=0)
        asked = stops.max_tokens
        if asked is None:
            if not is_chat:
                stops.max_tokens = max(1, combined - longest)
        elif self.rejects_total and longest + asked > combined:
            raise RequestRejected(
                400,
                f"This model configuration accepts at most {combined} combined input and output tokens. However, your "
                f"request has {longest} input tokens and asks for {asked} output tokens ({longest + asked} tokens "
                "total). Please reduce the input length or requested output length.",
                param="max_tokens",
                code="context_length_exceeded",
            )


class PromptTooLong(RequestRejected):
    """A prompt of `found` tokens, a number or a lower bound in words, where fewer than `limit_tokens` fit."""

    def __init__(self, limit_tokens: int, found: str, *, is_chat: bool) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages resulted in {found} "
            "tokens. Please reduce the length of the messages.",
            param="messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )
        self.limit_tokens, self.found = limit_tokens, found


# Rules that need to know the model: token ids it has, ranks its workers have. A broken one is a 400 naming the field.


def check_token_ids(request: CommonRequest, vocabulary_size: int) -> None:
    """Refuse ids that the model does not have: 0 to `vocabulary_size` - 1 exist.

    Raises:
        RequestRejected: 400 naming the field.
    """
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        for position, item in enumerate(request.prompt):
            if isinstance(item, int):
                _check("prompt", request.prompt, vocabulary_size)  # type: ignore[arg-type]  # one list of ids
                break
            if not isinstance(item, str):
                _check(f"prompt[{position}]", item, vocabulary_size)
    if request.token_data:
        _check("nvext.token_data", request.token_data, vocabulary_size)
    if isinstance(request.stop, list):
        _check("stop", [item for item in request.stop if isinstance(item, int)], vocabulary_size)
    if request.stop_token_ids:
        _check("stop_token_ids", request.stop_token_ids, vocabulary_size)
    if request.allowed_token_ids:
        _check("allowed_token_ids", request.allowed_token_ids, vocabulary_size)
    if request.logprob_token_ids:
        _check("logprob_token_ids", request.logprob_token_ids, vocabulary_size)
    if request.bad_words_token_ids:
        _check("bad_words_token_ids", chain.from_iterable(request.bad_words_token_ids), vocabulary_size)
    if request.logit_bias:
        _check("logit_bias", map(int, request.logit_bias), vocabulary_size)


def check_ranks(request: CommonRequest, ranks: Sequence[range], prefill_ranks: Sequence[range] = ()) -> None:
    """Refuse a data-parallel rank that no worker has.

    `ranks` are those of the workers that may answer, `prefill_ranks` those of the workers that compute prompts for them;
    where there are none of the latter, nothing reads the prefill rank.

    Raises:
        RequestRejected: 400 naming the field.
    """
    if request.nvext is None:
        return
    _check_rank("nvext.dp_rank", request.nvext.dp_rank, ranks, "workers")
    if prefill_ranks:
        _check_rank("nvext.prefill_dp_rank", request.nvext.prefill_dp_rank, prefill_ranks, "prefill workers")


def _check_rank(field: str, rank: int | None, ranks: Sequence[range], workers: str) -> None:
    if rank is None or any(rank in known for known in ranks):
        return
    known = ", ".join(sorted({str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in ranks if one}))
    _refuse(f"{field} {rank} does not exist: the {workers} of this model have {known or 'none'}", field)


def _check(field: str, ids: Iterable[int], vocabulary_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocabulary_size:
        _refuse(
            f"{field} holds the token id {largest}, but this model's ids end at {vocabulary_size - 1}",
            field,
        )


def _refuse(message: str, param: str) -> NoReturn:
    raise RequestRejected(400, f"Validation: {message}", param=param)
