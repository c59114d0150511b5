"""Rules that need to know the model: token ids it has, ranks its workers have. A broken one is a 400 naming the field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NoReturn

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import CommonRequest, CompletionRequest


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
