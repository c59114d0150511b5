"""From the contract's request to TensorRT-LLM's `SamplingParams`, and from its outputs to chunks: plain values."""

from __future__ import annotations

import json
import re
from typing import Any

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, usage
from dynamo.contract.requests.generation import GenerationRequest, OutputConstraint
from dynamo.contract.requests.logprobs import extract_from_completion_output
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.errors import EngineShutdown

NO_END = -1  # as TensorRT-LLM writes "no end token"


def sampling_parameters(asked: GenerationRequest) -> dict[str, Any]:
    """Return keyword arguments of `SamplingParams`, without the constraint."""
    is_greedy = asked.temperature == 0
    ends = asked.stop_token_ids
    found: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens or None,
        "temperature": 1.0 if is_greedy else asked.temperature,
        "top_k": 1 if is_greedy else asked.top_k,  # 0 is off there
        "top_p": asked.top_p,
        "min_p": asked.min_p or None,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "seed": asked.seed,
        "ignore_eos": asked.ignore_eos,
        "end_id": ends[0] if ends else NO_END,
        "pad_id": 0,
        "stop_token_ids": list(ends[1:]) or None,
        "logprobs": None if asked.logprobs is None else max(asked.logprobs, 1),
        "detokenize": False,
    }
    return {name: value for name, value in found.items() if value is not None}


def guided_parameters(constraint: OutputConstraint) -> dict[str, Any]:
    """Return keyword arguments of `GuidedDecodingParams`, which has no choice: a regex of the texts stands for it."""
    value = constraint.value
    match constraint.kind:
        case "json":
            return {"json": json.dumps(value)}
        case "choice":
            return {"regex": "|".join(re.escape(text) for text in value)}
        case "structural_tag":
            return {"structural_tag": serialize_structural_tag(value)}
    return {constraint.kind: value}


class TrtllmAnswer:
    """One request's outputs. They are cumulative: each holds every token so far."""

    __slots__ = ("_asked", "_cached", "_seen", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._seen = 0
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, result: Any) -> GenerateChunk | None:
        """Return what one result adds; None for nothing. Raises EngineShutdown for a request that was given up."""
        output = result.outputs[0]
        self._cached = getattr(result, "cached_tokens", self._cached)
        ids = list(output.token_ids[self._seen :])
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and ids:
            chosen, alternatives = extract_from_completion_output(output, self._seen)
            if chosen is not None:
                chunk["log_probs"] = chosen
            if alternatives is not None and self._asked.logprobs:
                chunk["top_logprobs"] = alternatives
        self._seen += len(ids)
        reason = output.finish_reason
        if reason is None:
            return chunk if ids else None
        if reason not in ("stop", "length"):
            raise EngineShutdown(f"TensorRT-LLM ended the request by itself ({reason})")
        self.is_complete = True
        chunk["finish_reason"] = reason
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._seen, cached_tokens=self._cached)
