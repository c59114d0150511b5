"""From the contract's request to llama.cpp's, and from its events to chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo.contract.chunks import CompletionUsage, GenerateChunk, TopLogprob, usage
from dynamo.contract.requests.generation import GenerationRequest

# Of the last event: the rest of it repeats the request and the whole prompt.
LAST_FIELDS: Final = ("tokens", "stop", "stop_type", "truncated", "timings/cache_n", "completion_probabilities")


def completion_body(
    asked: GenerationRequest, grammar: str | None, context_length: int, *, uses_cache: bool = True
) -> dict[str, Any]:
    """Return the body of llama.cpp's `/completion`. Every option is set: its own defaults differ from the field's."""
    body: dict[str, Any] = {
        "prompt": asked.prompt,
        "n_predict": asked.max_tokens,
        "stream": True,
        "return_tokens": True,
        "response_fields": list(LAST_FIELDS),
        "cache_prompt": uses_cache,
        "ignore_eos": asked.ignore_eos,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "typical_p": 1.0,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repeat_penalty": asked.repetition_penalty,
        "repeat_last_n": context_length,  # penalties cover the whole of it
        "dry_multiplier": 0.0,
        "n_probs": 0 if asked.logprobs is None else max(asked.logprobs, 1),  # 0 is off
    }
    if asked.seed is not None:
        body["seed"] = asked.seed % 2**32
    if asked.logit_bias:
        body["logit_bias"] = [[token, bias] for token, bias in asked.logit_bias.items()]
    if grammar is not None:
        body["grammar"] = grammar
    return body


class LlamaAnswer:
    """One request's events, as they come."""

    __slots__ = ("_asked", "_cached", "_is_stopped", "_stops", "_tokens", "is_complete")

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._stops = frozenset(asked.stop_token_ids)
        self._tokens = 0
        self._is_stopped = False  # a stop token has come
        self._cached: int | None = None
        self.is_complete = False

    def chunk(self, event: Mapping[str, Any]) -> GenerateChunk | None:
        """Return what one event adds; None for nothing. After the last chunk `is_complete` is true.

        llama.cpp itself ends an answer at the end tokens of its file alone. At any other stop token the answer ends here,
        with the event behind that token, and the caller ends the request.
        """
        ids: list[int] = list(event.get("tokens") or ())
        probabilities: list[Any] = list(event.get("completion_probabilities") or ())
        is_last = self._is_stopped or bool(event.get("stop"))
        if self._is_stopped:
            ids = []
        elif (cut := next((place for place, token in enumerate(ids, 1) if token in self._stops), None)) is not None:
            ids, probabilities, self._is_stopped = ids[:cut], probabilities[:cut], True
        self._tokens += len(ids)
        chunk: GenerateChunk = {"token_ids": ids, "index": 0}
        if self._asked.logprobs is not None and len(probabilities) == len(ids) > 0:
            chunk["log_probs"] = [float(entry["logprob"]) for entry in probabilities]
            if self._asked.logprobs:
                chunk["top_logprobs"] = [_alternatives(entry, self._asked.logprobs) for entry in probabilities]
        if event.get("timings/cache_n") is not None:
            self._cached = int(event["timings/cache_n"])
        if not is_last:
            return chunk if ids else None
        self.is_complete = True
        chunk["finish_reason"] = "length" if not self._is_stopped and event.get("stop_type") == "limit" else "stop"
        chunk["completion_usage"] = self.usage()
        return chunk

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(len(self._asked.prompt), self._tokens, cached_tokens=self._cached)


def _alternatives(entry: Mapping[str, Any], count: int) -> list[TopLogprob]:
    return [
        {"rank": rank, "token_id": int(other["id"]), "token": other.get("token"), "logprob": float(other["logprob"])}
        for rank, other in enumerate(entry.get("top_logprobs") or (), 1)
        if rank <= count
    ]
