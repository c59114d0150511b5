"""vLLM's `AsyncLLM` behind the contract, in the worker's process; the model runs in processes that vLLM starts.

request -> `sampling` -> AsyncLLM.generate -> `answers` -> chunks; tokens only, the frontend has the tokenizer
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, MetricsHandle
from dynamo.contract.health_check import bos_token_id_or, build_health_check_payload
from dynamo.contract.kv_events import KvEventSource
from dynamo.contract.metrics import register_global_registry
from dynamo.contract.requests.dp_rank import forced_dp_rank, validate_global_dp_rank
from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.context import Context
from dynamo.runtime.process_guard import descendants
from dynamo.vllm.answers import VllmAnswer
from dynamo.vllm.arguments import Arguments, read_arguments
from dynamo.vllm.errors import map_vllm_error
from dynamo.vllm.operations import CONTROLS, VllmOperations
from dynamo.vllm.reports import LoadReports, event_sources
from dynamo.vllm.sampling import VllmLimits, constraint_of, read_sampling
from dynamo.vllm.starting import Started, start_vllm

if TYPE_CHECKING:
    from dynamo.worker.kv_publishing.publisher import SnapshotPublisher

__all__ = ["VllmEngine"]

logger = logging.getLogger(__name__)

SALT_PREFIX: Final = "dynamo-cache-salt:"  # salts come untagged in vLLM's KV events: this one is recognised
HEALTH_SECONDS: Final = 0.25  # how often the engine core is looked at: vLLM's own monitor only sets a flag
SHUTDOWN_SECONDS: Final = 1.0  # for vLLM's processes to end by themselves; what is left is killed


class VllmEngine(LLMEngine):
    """Serves a model with vLLM."""

    has_child_processes: ClassVar[bool] = True
    skips_teardown: ClassVar[bool] = True

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._reports = LoadReports()
        self._started: Started | None = None
        self._limits: VllmLimits | None = None
        self._operations: VllmOperations | None = None
        self._running: dict[str, list[str]] = {}  # vLLM's request ids by context id; clients may repeat one
        self._numbers = count()
        self._later: frozenset[str] = frozenset()  # keywords of `generate` that this release has
        self._was_cleaned_up = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments = await asyncio.to_thread(read_arguments, argv)
        return cls(arguments), arguments.worker

    async def start(self, worker_id: int) -> EngineConfig:
        started = await start_vllm(self._arguments, self._reports)
        self._started = started
        if self._was_cleaned_up:
            await self.cleanup()
            raise EngineShutdown("this engine was cleaned up while it started")
        config = started.config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        self._limits = VllmLimits(model.max_model_len, model.get_vocab_size(), model.get_diff_sampling_param())
        self._operations = VllmOperations(started.client, self._make_step)
        self._later = frozenset(inspect.signature(started.client.generate).parameters)
        ranks = len(self._ranks)
        blocks = (
            None if cache.num_gpu_blocks is None else cache.num_gpu_blocks // ranks
        )  # vLLM adds those of all ranks up
        self._reports.blocks_per_rank = blocks or 0
        lora = config.lora_config
        return EngineConfig(
            model=self._arguments.model,
            served_model_name=self._arguments.served_name,
            context_length=model.max_model_len,
            kv_cache_block_size=await self._block_size(),
            total_kv_blocks=blocks,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            data_parallel_size=ranks,
            data_parallel_start_rank=parallel.data_parallel_rank or 0,
            model_aliases=list(self._arguments.aliases),
            max_gpu_lora_count=None if lora is None else lora.max_loras,
        )

    @property
    def _ranks(self) -> range:
        """The data-parallel ranks of this worker."""
        if self._started is None:
            return range(1)
        parallel = self._started.config.parallel_config
        first = parallel.data_parallel_rank or 0
        return range(first, first + max(1, parallel.data_parallel_size_local or parallel.data_parallel_size))

    async def _block_size(self) -> int:
        """Return the block size of the main group of layers; releases without the question have one group."""
        assert self._started is not None
        try:
            groups = await self._started.client.engine_core.call_utility_async("get_kv_cache_group_metadata")
            full = [group["block_size"] for group in groups if "full" in str(group["kind"])]
            if full:
                return int(full[0])
        except Exception:
            logger.debug("vLLM does not describe its groups of KV blocks", exc_info=True)
        return int(self._started.config.cache_config.block_size)

    # -- a request ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        started, limits, operations = self._started, self._limits, self._operations
        if started is None or limits is None or operations is None or self._was_cleaned_up:
            raise EngineShutdown("vLLM is not running")
        operations.check_serving()
        prompt = token_ids_to_list(request["token_ids"])
        if not prompt:
            raise InvalidArgument("token_ids must not be empty")
        options = read_sampling(request, limits)
        answer = VllmAnswer(
            len(prompt), options["n"], wants_logprobs="logprobs" in options or "logprob_token_ids" in options
        )
        if context.is_stopped():
            yield answer.cancelled()
            return
        request_id = f"{context.id()}-{next(self._numbers)}"
        self._running.setdefault(context.id(), []).append(request_id)
        try:
            stream = started.client.generate(
                self._prompt(prompt, request), self._sampling(options, request), request_id, **self._keywords(request)
            )
            async with aclosing(stream):
                async for output in stream:
                    if context.is_stopped():
                        break
                    for chunk in answer.chunks(output):
                        yield chunk
                    if answer.is_complete:
                        return
            if context.is_stopped():
                yield answer.cancelled()
        except Exception:
            if context.is_stopped() and not started.client.errored:  # an abort may come before the request is known
                yield answer.cancelled()
                return
            raise
        finally:
            siblings = self._running[context.id()]
            siblings.remove(request_id)
            if not siblings:
                del self._running[context.id()]

    def _prompt(self, prompt: list[int], request: GenerateRequest) -> Any:
        from vllm.inputs import tokens_input

        salt = (request.get("routing") or {}).get("cache_salt")
        return tokens_input(prompt, cache_salt=None if not salt else SALT_PREFIX + salt)

    def _sampling(self, options: dict[str, Any], request: GenerateRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        constraint = constraint_of(request)
        guided = None if constraint is None else StructuredOutputsParams(**constraint)
        return SamplingParams(
            **options,
            structured_outputs=guided,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )

    def _keywords(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the further arguments of `generate`."""
        assert self._started is not None
        config, routing = self._started.config, request.get("routing") or {}
        keywords: dict[str, Any] = {}
        if config.scheduler_config.policy == "priority":
            keywords["priority"] = -(routing.get("priority") or 0)  # vLLM begins with the lowest
        rank = validate_global_dp_rank(forced_dp_rank(request), self._ranks.start, len(self._ranks), "vLLM")
        if rank is not None:
            keywords["data_parallel_rank"] = rank
        if routing.get("lora_name"):
            raise InvalidArgument(
                f"routing.lora_name is {routing['lora_name']!r}: LoRA adapters are not built for vLLM yet"
            )
        if "reasoning_ended" in self._later and not request.get("require_reasoning"):
            keywords["reasoning_ended"] = True  # a constraint holds from the first token on
        return keywords

    async def _make_step(self) -> None:
        """Generate a token that nobody gets: vLLM publishes what has happened to its cache with every step."""
        request: GenerateRequest = {"token_ids": [0], "stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
        async for _ in self.generate(request, Context()):
            pass

    async def abort(self, context: Context) -> None:
        ids = list(self._running.get(context.id(), ()))
        if ids and self._started is not None:
            await self._started.client.abort(ids)

    def map_error(self, error: Exception) -> Exception | None:
        return map_vllm_error(error)

    # -- its life -----------------------------------------------------------------------------------------------------

    async def wait_dead(self) -> str:
        while True:
            if self._started is not None and not self._was_cleaned_up and self._started.client.errored:
                return "vLLM's engine core is gone"
            await asyncio.sleep(HEALTH_SECONDS)

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        started, self._started = self._started, None
        if started is None:
            return
        with suppress(Exception):
            await started.client.abort([one for ids in self._running.values() for one in ids])
        mine = await asyncio.to_thread(descendants, os.getpid())
        try:
            await asyncio.to_thread(started.client.shutdown, SHUTDOWN_SECONDS)
        finally:
            await asyncio.to_thread(_kill, mine)
            shutil.rmtree(started.directory, ignore_errors=True)

    # -- what an operator asks for ------------------------------------------------------------------------------------

    def supported_controls(self) -> set[str]:
        return set(CONTROLS)

    async def validate_engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._operations is None else self._operations.refusal(name, body)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._operations is None:
            return await super().engine_control(control, body)
        return await self._operations.control(control, body)

    async def register_prometheus(self, metrics: MetricsHandle) -> None:
        register_global_registry(metrics, engine_prefix="vllm:", multiproc_only_prefixes=["lmcache:"])

    # -- what the worker asks for -------------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, Any] | None:
        tokenizer = None
        if self._started is not None:
            with suppress(Exception):  # started without one
                tokenizer = self._started.client.get_tokenizer()
        return build_health_check_payload(bos_token_id_or(tokenizer, 0))

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self._started is None else event_sources(self._started.config.kv_events_config, self._ranks)

    def component_metrics_dp_ranks(self) -> list[int]:
        return list(self._ranks)

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._reports.publisher = publisher


def _kill(processes: dict[int, str]) -> None:
    """Kill the processes of the engine that have not ended."""
    left = descendants(os.getpid())
    for number in processes:
        if left.get(number) == processes[number]:
            logger.debug("process %d of vLLM had not ended", number)
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
