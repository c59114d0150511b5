"""vLLM's `AsyncLLM` behind the contract, in the worker's process; the model runs in processes that vLLM starts.

request -> `submissions` -> AsyncLLM.generate -> `answers` -> chunks; tokens only, the frontend has the tokenizer
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.embedding import Embedding, EmbedRequest
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, MetricsHandle
from dynamo.contract.health_check import (
    bos_token_id_or,
    build_health_check_payload,
    build_raw_health_check_payload,
)
from dynamo.contract.kv_events import KvEventSource
from dynamo.contract.metrics import register_global_registry
from dynamo.engines.adapter import AdapterEngine
from dynamo.errors import InvalidArgument
from dynamo.runtime.base.process_guard import descendants, end_processes, note_shared_memory, shared_memory_of
from dynamo.runtime.calls.context import Context
from dynamo.vllm.adapters import adapter_limits
from dynamo.vllm.arguments import Arguments, read_arguments
from dynamo.vllm.errors import map_vllm_error
from dynamo.vllm.operations import CONTROLS, UPDATES, VllmOperations
from dynamo.vllm.pooling import POOLING, VllmPooling, check_tasks
from dynamo.vllm.reports import LoadReports, event_sources
from dynamo.vllm.requests import VllmAnswer, VllmSubmissions, local_ranks
from dynamo.vllm.starting import Started, start_vllm
from dynamo.vllm.training import VllmTraining

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint
    from dynamo.worker.kv_publishing.publisher import SnapshotPublisher

logger = logging.getLogger(__name__)

HEALTH_SECONDS: Final = 0.25  # how often the engine core is checked: vLLM's own monitor only sets a flag
SHUTDOWN_SECONDS: Final = 1.0  # for vLLM's processes to end by themselves; what is left is killed


class VllmEngine(AdapterEngine[Arguments]):
    """Serves a model with vLLM."""

    engine_name: ClassVar[str] = "vLLM"
    has_child_processes: ClassVar[bool] = True
    skips_teardown: ClassVar[bool] = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        self._reports = LoadReports()
        self._started: Started | None = None
        self._submissions: VllmSubmissions | None = None
        self._pooling: VllmPooling | None = None  # of a worker that makes vectors
        self._operations: VllmOperations | None = None
        self._running: dict[str, list[str]] = {}  # vLLM's request ids by context id; clients may repeat one
        self._numbers = count()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        arguments = await asyncio.to_thread(read_arguments, argv)
        return cls(arguments), arguments.worker

    async def start(self, worker_id: int) -> EngineConfig:
        started = await start_vllm(self._arguments, self._reports)
        self._started = started
        await self.check_wanted()
        mine = await asyncio.to_thread(descendants, os.getpid())
        await asyncio.to_thread(note_shared_memory, started.directory, [os.getpid(), *mine])
        config = started.config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        limits = adapter_limits(config.lora_config, is_cpu=started.is_cpu)
        self._operations = VllmOperations(
            started.client, self._make_step, model=model.model, limits=limits, parallel=parallel
        )
        self._submissions = VllmSubmissions(started.client, config, self._arguments.role, self._operations.adapters)
        if model.runner_type == POOLING:
            tasks = await started.client.get_supported_tasks()
            check_tasks(tasks, self._arguments.worker.endpoint_types)
            self._pooling = VllmPooling(started.client, config, self._operations.adapters, tasks)
        ranks = len(self._ranks)
        blocks = (
            None if cache.num_gpu_blocks is None else cache.num_gpu_blocks // ranks
        )  # vLLM adds those of all ranks up
        self._reports.blocks_per_rank = blocks or 0
        return self.described(
            model.max_model_len,
            declared={} if self._arguments.embeds else {"vllm_inference_v1_generate": True},  # its route of tokens
            kv_cache_block_size=await self._block_size(),
            total_kv_blocks=blocks,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            data_parallel_size=ranks,
            data_parallel_start_rank=parallel.data_parallel_rank or 0,
            model_aliases=list(self._arguments.aliases),
            max_gpu_lora_count=None if limits is None else min(limits.most, config.lora_config.max_loras),
        )

    @property
    def _ranks(self) -> range:
        """The data-parallel ranks of this worker."""
        return range(1) if self._started is None else local_ranks(self._started.config)

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
        started, submissions, operations = self._started, self._submissions, self._operations
        if started is None or submissions is None or operations is None or self._was_cleaned_up:
            raise self.not_running()
        if self._pooling is not None:
            raise InvalidArgument("this worker makes embeddings and generates nothing")
        role = self._arguments.role
        transfer = role.transfer(request)
        async with _handed_over(started.client, transfer) as blocks:
            operations.check_serving()
            submission = submissions.read(request, transfer)
            answer = VllmAnswer(
                submission.prompt_tokens,
                submission.choices,
                wants_logprobs=submission.wants_logprobs,
                hand_over=role.handed_over,
            )
            if context.is_stopped():
                yield answer.cancelled()
                return
            if submission.unwanted is not None:
                logger.warning("request %s: its prompt is computed here: %s", context.id(), submission.unwanted)
                await blocks.decline()
            with self._registered(context) as request_id, operations.adapters.used(submission.adapter) as adapter:
                stream = started.client.generate(
                    submission.prompt, submission.sampling, request_id, lora_request=adapter, **submission.keywords
                )
                try:
                    async with aclosing(stream):
                        blocks.are_settled = True  # from here on vLLM answers for them
                        async for output in stream:
                            if context.is_stopped():
                                break
                            for chunk in answer.chunks(output):
                                yield chunk
                            if answer.is_complete:
                                return
                    if context.is_stopped():
                        yield answer.cancelled()
                except Exception as error:
                    if isinstance(map_vllm_error(error), InvalidArgument):
                        blocks.are_settled = False  # vLLM refused the request before its connector saw it
                    if (
                        context.is_stopped() and not started.client.errored
                    ):  # an abort may come before the request is known
                        yield answer.cancelled()
                        return
                    raise

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        started, pooling, operations = self._started, self._pooling, self._operations
        if started is None or operations is None or self._was_cleaned_up:
            raise self.not_running()
        if pooling is None:
            raise InvalidArgument("this worker generates; one that makes embeddings is started with --embedding-worker")
        operations.check_serving()
        if context.is_stopped():
            return
        for vector in await pooling.vectors(request, partial(self._registered, context)) or ():
            yield vector

    @contextmanager
    def _registered(self, context: Context) -> Iterator[str]:
        """Give a request an id of its own at vLLM, by which `abort` finds it: clients may repeat theirs."""
        request_id = f"{context.id()}-{next(self._numbers)}"
        siblings = self._running.setdefault(context.id(), [])
        siblings.append(request_id)
        try:
            yield request_id
        finally:
            siblings.remove(request_id)
            if not siblings:
                del self._running[context.id()]

    async def _make_step(self) -> None:
        """Generate a token and drop it: vLLM publishes what has happened to its cache with every step."""
        if self._pooling is not None:
            async for _ in self.embed({"token_ids": [[0]], "task": self._pooling.canary_task}, Context()):
                pass
            return
        request: GenerateRequest = {"token_ids": [0], "stop_conditions": {"max_tokens": 1, "ignore_eos": True}}
        async for _ in self.generate(request, Context()):
            pass

    async def abort(self, context: Context) -> None:
        await self._abort_running(context.id())

    async def _abort_running(self, context_id: str) -> None:
        ids = list(self._running.get(context_id, ()))
        if ids and self._started is not None:
            await self._started.client.abort(ids)

    def map_error(self, error: Exception) -> Exception | None:
        return map_vllm_error(error)

    # -- its life -----------------------------------------------------------------------------------------------------

    async def wait_dead(self) -> str:
        while True:
            if self._started is not None and not self._was_cleaned_up and self._started.client.errored:
                return "vLLM's engine core is gone"
            if self._operations is not None and self._operations.experts.failure:
                return self._operations.experts.failure
            await asyncio.sleep(HEALTH_SECONDS)

    async def cleanup(self) -> None:
        self._was_cleaned_up = True
        started, self._started = self._started, None
        if started is None:
            return
        if self._operations is not None:
            await self._operations.adapters.close()
        with suppress(Exception):
            await started.client.abort([one for ids in self._running.values() for one in ids])
        mine = await asyncio.to_thread(descendants, os.getpid())
        shared = await asyncio.to_thread(shared_memory_of, mine)
        try:
            await asyncio.to_thread(started.client.shutdown, SHUTDOWN_SECONDS)
        finally:
            await asyncio.to_thread(end_processes, mine, shared)
            shutil.rmtree(started.directory, ignore_errors=True)

    async def is_quiescent(self) -> bool | None:
        """Return whether no decode worker may come for blocks: vLLM reports them as used until they are fetched."""
        return self._reports.used_blocks == 0

    # -- what an operator calls ---------------------------------------------------------------------------------------

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        if self._operations is None or self._started is None:
            return
        self._operations.adapters.endpoint = endpoint
        if self._arguments.worker.enable_rl:
            training = VllmTraining(self._started.client, self._operations, self._abort_running)
            for name, route in training.routes().items():
                endpoint.runtime.register_engine_route(name, route)

    def supported_controls(self) -> set[str]:
        return set(CONTROLS)

    def supported_updates(self) -> set[str]:
        return set(UPDATES)

    async def validate_engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._operations is None else self._operations.refusal(name, body)

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._operations is None:
            return await super().engine_control(control, body)
        return await self._operations.control(control, body)

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._operations is None:
            return await super().engine_update(update, body)
        return await self._operations.update(update, body)

    async def register_prometheus(self, metrics: MetricsHandle) -> None:
        register_global_registry(metrics, engine_prefix="vllm:", multiproc_only_prefixes=["lmcache:"])

    # -- what the worker calls ----------------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, Any] | None:
        tokenizer = None
        if self._started is not None:
            with suppress(Exception):  # started without one
                tokenizer = self._started.client.get_tokenizer()
        bos = bos_token_id_or(tokenizer, 0)
        if self._pooling is not None:
            return build_raw_health_check_payload({"token_ids": [[bos]], "task": self._pooling.canary_task})
        return build_health_check_payload(bos)

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self._started is None else event_sources(self._started.config.kv_events_config, self._ranks)

    def component_metrics_dp_ranks(self) -> list[int]:
        return list(self._ranks)

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._reports.publisher = publisher


class _HeldBlocks:
    """The blocks that a prefill worker holds for one request: fetched, or declined; else they are held for 30 s."""

    __slots__ = ("_client", "_transfer", "are_settled")

    def __init__(self, client: Any, transfer: dict[str, Any] | None) -> None:
        """`client`: vLLM's `AsyncLLM`. `transfer`: what its connector gets of the request."""
        self._client = client
        self._transfer = transfer if transfer is not None and transfer.get("do_remote_prefill") else None
        self.are_settled = False

    async def decline(self) -> None:
        """Let the prefill worker free them, if there are any that are not settled. Releases of vLLM before 0.24 cannot."""
        if self.are_settled or self._transfer is None:
            return
        self.are_settled = True
        decline = getattr(self._client, "notify_kv_transfer_request_rejected", None)
        if decline is not None and not self._client.errored:
            with suppress(Exception):  # they expire
                await decline(f"declined-{uuid.uuid4().hex}", self._transfer)


@asynccontextmanager
async def _handed_over(client: Any, transfer: dict[str, Any] | None) -> AsyncIterator[_HeldBlocks]:
    """Decline the blocks of a request that did not get as far as vLLM."""
    blocks = _HeldBlocks(client, transfer)
    try:
        yield blocks
    finally:
        await blocks.decline()
