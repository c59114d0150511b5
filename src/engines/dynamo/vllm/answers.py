"""From vLLM's outputs to chunks of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dynamo.contract.engine import CompletionUsage, GenerateChunk, usage
from dynamo.contract.requests.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
)
from dynamo.errors import EngineShutdown


class VllmAnswer:
    """One request's outputs, as they come: an output may hold no token, one or several."""

    __slots__ = (
        "_cached",
        "_choices_left",
        "_hand_over",
        "_prompt_logprobs",
        "_prompt_tokens",
        "_tokens",
        "_wants_logprobs",
    )

    def __init__(
        self,
        prompt_tokens: int,
        choices: int,
        *,
        wants_logprobs: bool,
        hand_over: Callable[[Any], dict[str, Any] | None] = lambda _output: None,
    ) -> None:
        """`hand_over`: what the last output has for a decode worker, if there is one."""
        self._prompt_tokens, self._choices_left = prompt_tokens, choices
        self._wants_logprobs, self._hand_over = wants_logprobs, hand_over
        self._tokens = 0
        self._cached: int | None = None
        self._prompt_logprobs: Any = None  # they come once, with an early output

    @property
    def is_complete(self) -> bool:
        """Whether every choice has had its last chunk."""
        return self._choices_left == 0

    def chunks(self, output: Any) -> Iterable[GenerateChunk]:
        """Return what one `RequestOutput` adds. Raises EngineShutdown for a request that the engine gave up."""
        parts = output.outputs
        if self._cached is not None and len(parts) == 1 and not self._wants_logprobs:
            part = parts[0]
            if part.finish_reason is None and part.token_ids and not output.prompt_logprobs:  # nearly every output
                ids = list(part.token_ids)
                self._tokens += len(ids)
                return ({"token_ids": ids, "index": part.index},)
        return self._all_chunks(output)

    def _all_chunks(self, output: Any) -> Iterator[GenerateChunk]:
        if output.num_cached_tokens is not None:
            self._cached = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs = extract_prompt_logprobs_from_completion_output(output)
        for part in output.outputs:
            ids = list(part.token_ids)
            self._tokens += len(ids)
            chunk: GenerateChunk = {"token_ids": ids, "index": part.index}
            if self._wants_logprobs and part.logprobs:
                self._add_logprobs(chunk, part)
            reason = part.finish_reason
            if reason is None:
                if ids:
                    yield chunk
                continue
            if reason in ("abort", "error"):  # its own doing: the KV transfer failed, or it was paused with an abort
                raise EngineShutdown(f"vLLM ended the request by itself ({reason})")
            self._choices_left -= 1
            chunk["finish_reason"] = "length" if reason == "length" else "stop"
            if part.stop_reason is not None:
                chunk["stop_reason"] = part.stop_reason
            if self._choices_left == 0:
                chunk["completion_usage"] = self.usage()
                if self._prompt_logprobs is not None:
                    chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
                if (handed_over := self._hand_over(output)) is not None:
                    chunk["disaggregated_params"] = handed_over
            yield chunk

    def _add_logprobs(self, chunk: GenerateChunk, part: Any) -> None:
        chosen, alternatives = extract_from_completion_output(part, 0)
        if chosen is not None:
            chunk["log_probs"] = chosen
        if alternatives is not None:
            chunk["top_logprobs"] = alternatives

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(self._prompt_tokens, self._tokens, cached_tokens=self._cached)
