"""A stand-in for the parts of TensorRT-LLM 1.2 that `dynamo.trtllm` uses, as its documentation describes them.

Outputs are cumulative, the token that ends an answer is not among them, an abort ends the stream with a result whose reason is
`cancelled`, and unknown arguments are errors. Each request is served by a task; the answer counts up from the last prompt token.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self

__all__ = ["LLM", "SleepingLLM", "installed"]


@dataclass
class KvCacheConfig:
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    event_buffer_max_size: int = 0
    tokens_per_block: int = 32


@dataclass
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    max_tokens: int = 32
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    end_id: int | None = None
    pad_id: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """What `generate_async` returns: an asynchronous iterator of itself."""

    def __init__(self, prompt: list[int], sampling: SamplingParams, vocab_size: int) -> None:
        self.prompt_token_ids, self._sampling, self._vocab_size = prompt, sampling, vocab_size
        self.outputs = [CompletionOutput()]
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        output, sampling = self.outputs[0], self._sampling
        if output.finish_reason is not None:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        if self._aborted:
            output.finish_reason = "cancelled"
            return self
        token = (self.prompt_token_ids[-1] + len(output.token_ids) + 1) % self._vocab_size
        ends = {*(sampling.stop_token_ids or ()), *(() if sampling.ignore_eos else (sampling.end_id,))}
        if token in ends:
            output.finish_reason = "stop"
            return self
        output.token_ids = [*output.token_ids, token]
        if sampling.logprobs:
            position = {
                (token + rank) % self._vocab_size: Logprob(-0.5 - rank, rank + 1) for rank in range(sampling.logprobs)
            }
            output.logprobs = [*output.logprobs, position]
        if len(output.token_ids) >= sampling.max_tokens:
            output.finish_reason = "length"
        return self


class LLM:
    """The engine. `made` holds the arguments of each that was made."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 - of the stand-in, read by its tests
    KNOWN = frozenset(
        {
            "model", "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "enable_attention_dp",
            "max_batch_size", "max_num_tokens", "max_seq_len", "kv_cache_config", "guided_decoding_backend",
            "skip_tokenizer_init", "backend", "sleep_config",
        }
    )  # fmt: skip

    def __init__(self, **arguments: Any) -> None:
        if unknown := arguments.keys() - self.KNOWN:
            raise ValueError(f"LLM got invalid argument: {sorted(unknown)}")
        self.made.append(arguments)
        self.requests: list[RequestOutput] = []
        self.is_shut_down = False

    def generate_async(
        self,
        inputs: dict[str, list[int]],
        sampling_params: SamplingParams,
        streaming: bool = False,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if not streaming:
            raise ValueError("the stand-in only streams")
        self.requests.append(RequestOutput(inputs["prompt_token_ids"], sampling_params, 840))
        return self.requests[-1]

    def shutdown(self) -> None:
        self.is_shut_down = True


class SleepingLLM(LLM):
    """The engine as of 1.4: it gives memory back and takes it again."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.log: list[str] = []

    def release(self) -> None:
        if any(request.outputs[0].finish_reason is None for request in self.requests):
            raise RuntimeError("requests are in flight")
        self.log.append("release")

    def resume(self) -> None:
        self.log.append("resume")


@contextmanager
def installed(llm: type[LLM] = LLM) -> Iterator[None]:
    """Put the stand-in where `import tensorrt_llm` finds it, for the time of the block."""
    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    package.__dict__.update(LLM=llm, SamplingParams=SamplingParams, llmapi=api, __path__=[])
    api.__dict__.update(KvCacheConfig=KvCacheConfig, GuidedDecodingParams=GuidedDecodingParams)
    LLM.made.clear()
    names = ("tensorrt_llm", "tensorrt_llm.llmapi")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules |= {"tensorrt_llm": package, "tensorrt_llm.llmapi": api}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules |= {name: module for name, module in before.items() if module is not None}
