"""What the reference engine serves of the frontend's routes of tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

from dynamo.contract.engine import GenerateChunk, GenerateRequest
from dynamo.errors import InvalidArgument

DECLARED: Final = {"vllm_inference_v1_generate": True, "sglang_generate": True}
"""The runtime data by which a frontend knows that this engine serves them."""

VLLM: Final = "vllm_tito"
SGLANG: Final = "sglang_tito"
ENVELOPES: Final = frozenset({VLLM, SGLANG})
"""The members of `extra_args` with a request as its client sent it."""

SERVED: Final = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "thinking_token_budget", "logprobs",
        "prompt_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "stop_token_ids",
        "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "structured_outputs",
    }
)  # fmt: skip
"""The sampling parameters that reach this engine as options of any request; those without an effect on tokens are not refused."""

SERVED_SGLANG: Final = frozenset(
    {
        "max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "sampling_seed",
    }
)  # fmt: skip
"""The same of SGLang's. Its `stop` would need texts, which these answers do not have."""

WITHOUT_EFFECT: Final = frozenset({"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"})


_OF_SGLANG: Final[Mapping[str, Mapping[str, str]]] = {
    "sampling_options": {
        "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "sampling_seed",
        "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
        "repetition_penalty": "repetition_penalty",
    },
    "stop_conditions": {"stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos"},
}  # fmt: skip
"""The names that SGLang's sampling parameters have in a request, by group."""


def with_sglang_sampling(group: str, options: object, extra_args: Mapping[str, object]) -> object:
    """Return a group of a request's options, completed by what its client sent to SGLang's route.

    A frontend of 1.6.1 leaves them in the envelope alone.
    """
    envelope = extra_args.get(SGLANG)
    sampling = envelope.get("sampling_params") if isinstance(envelope, Mapping) else None
    if not isinstance(sampling, Mapping) or not (options is None or isinstance(options, Mapping)):
        return options
    completed = dict(options or {})
    for name, given in _OF_SGLANG[group].items():
        if completed.get(name) is None and sampling.get(given) is not None:
            completed[name] = sampling[given]
    return completed


def check_envelope(extra_args: Mapping[str, object]) -> None:
    """Refuse what only vLLM or SGLang has. Raises InvalidArgument naming the member."""
    of_sglang, envelope = extra_args.get(SGLANG), extra_args.get(VLLM)
    if isinstance(of_sglang, Mapping):
        _check_sampling(of_sglang.get("sampling_params"), SERVED_SGLANG)
    if not isinstance(envelope, Mapping):
        return
    _check_sampling(envelope.get("sampling_params"), SERVED)
    for name in ("features", "kv_transfer_params"):
        if envelope.get(name):
            raise InvalidArgument(f"{name} is not supported by the reference engine")


def _check_sampling(sampling: object, served: frozenset[str]) -> None:
    for name, value in sampling.items() if isinstance(sampling, Mapping) else ():
        if value not in (None, False) and name not in served and name not in WITHOUT_EFFECT:
            raise InvalidArgument(f"sampling_params.{name} is not supported by the reference engine")


def sglang_request(request: GenerateRequest) -> Mapping[str, object] | None:
    """Return the request as SGLang takes it; None for one of another route."""
    extra = request.get("extra_args")
    found = extra.get(SGLANG) if isinstance(extra, Mapping) else None
    return found if isinstance(found, Mapping) else None


async def in_sglang_shapes(
    chunks: AsyncGenerator[GenerateChunk, None], asked: Mapping[str, object], prompt_tokens: int
) -> AsyncGenerator[GenerateChunk, None]:
    """Yield an object of SGLang's for each chunk. As there, each has all tokens so far; it has no text, as none is made."""
    output_ids: list[int] = []
    logprobs: list[list[object]] = []
    cached = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            output_ids += chunk["token_ids"]
            scores = chunk.get("log_probs") or ()
            logprobs += [[score, token, None] for score, token in zip(scores, chunk["token_ids"], strict=False)]
            reason = chunk.get("finish_reason")
            if (usage := chunk.get("completion_usage")) is not None:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            meta: dict[str, object] = {
                "id": asked.get("rid"),
                "finish_reason": None if reason is None else _ended(reason, len(output_ids), chunk),
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(output_ids),
                "cached_tokens": cached,
            }
            if asked.get("return_logprob"):
                meta["output_token_logprobs"] = list(logprobs)
            response = {"text": "", "output_ids": list(output_ids), "meta_info": meta}
            found: GenerateChunk = {"token_ids": [], "index": 0, "engine_data": {"sglang_response": response}}
            if reason is not None:
                found["finish_reason"] = reason
                if usage is not None:
                    found["completion_usage"] = usage
            yield found


def _ended(reason: object, tokens: int, chunk: GenerateChunk) -> dict[str, object]:
    if reason == "length":
        return {"type": "length", "length": tokens}
    if reason == "cancelled":
        return {"type": "abort", "message": "the request was cancelled"}
    return {"type": "stop", "matched": chunk.get("stop_reason")}
