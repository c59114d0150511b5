"""From the contract's request to SGLang's sampling parameters, and from its outputs to chunks. No SGLang here: plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, usage
from dynamo.contract.requests.generation import GenerationRequest, OutputConstraint
from dynamo.contract.requests.logprobs import extract_from_sglang_meta
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.errors import EngineShutdown, HttpError, InvalidArgument

MAX_SEED: Final = 2**31  # SGLang keeps seeds as 32-bit integers


def sampling_parameters(asked: GenerationRequest) -> dict[str, Any]:
    """Return SGLang's `sampling_params`. Every option is set: its default of `max_new_tokens` is 128."""
    found: dict[str, Any] = {
        "max_new_tokens": asked.max_tokens,
        "min_new_tokens": asked.min_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": list(asked.stop_token_ids),
        "skip_special_tokens": False,
    }
    if asked.seed is not None:
        found["sampling_seed"] = asked.seed % MAX_SEED
    if asked.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in asked.logit_bias.items()}
    if asked.constraint is not None:
        found |= _constraint(asked.constraint)
    return found


def _constraint(constraint: OutputConstraint) -> dict[str, Any]:
    value = constraint.value
    match constraint.kind:
        case "json":
            return {"json_schema": json.dumps(value)}
        case "choice":
            return {"regex": "|".join(re.escape(text) for text in value)}
        case "grammar":
            return {"ebnf": value}
        case "structural_tag":
            return {"structural_tag": serialize_structural_tag(value)}
    return {"regex": value}


def logprob_arguments(asked: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of `async_generate` that request log probabilities; {} for none."""
    if asked.logprobs is None:
        return {}
    return {"return_logprob": True, "top_logprobs_num": asked.logprobs}


class SglangAnswer:
    """One request's outputs, as they come: each holds new tokens only."""

    __slots__ = ("_asked", "_cached", "_tokens", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._tokens = 0
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, output: Mapping[str, Any]) -> GenerateChunk | None:
        """Return what one output adds; None for nothing. After the last chunk `is_complete` is true.

        Raises InvalidArgument or HttpError for a request that SGLang refused: it does so with a finish reason, whose tokens
        mean nothing. Raises EngineShutdown for one that it gave up.
        """
        meta = output["meta_info"]
        reason = meta.get("finish_reason")
        check_not_aborted(reason)
        ids = [int(token) for token in output.get("output_ids") or ()]
        self._tokens += len(ids)
        self._cached = meta.get("cached_tokens", self._cached)
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and ids:
            chosen, alternatives = extract_from_sglang_meta(meta)
            if chosen is not None and len(chosen) == len(ids):
                chunk["log_probs"] = chosen
                if self._asked.logprobs and alternatives is not None:
                    chunk["top_logprobs"] = alternatives
        if reason is None:
            return chunk if ids else None
        self.is_complete = True
        chunk["finish_reason"] = "length" if reason["type"] == "length" else "stop"
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._tokens, cached_tokens=self._cached)


def check_not_aborted(reason: Mapping[str, Any] | None) -> None:
    """Raise InvalidArgument or HttpError for a finish reason with which SGLang refused a request, EngineShutdown for one with
    which it gave it up."""
    if reason is not None and reason["type"] == "abort":
        raise _refusal(reason)


def _refusal(reason: Mapping[str, Any]) -> Exception:
    message, status = str(reason.get("message") or "SGLang ended the request by itself"), reason.get("status_code")
    if status is None:
        return EngineShutdown(message)
    return InvalidArgument(message) if int(status) in (400, 422) else HttpError(int(status), message)
