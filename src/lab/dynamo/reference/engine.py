"""The reference engine behind the contract: one thread computes steps, the event loop only hands their results on.

request -> `generate` -> inbox -> [step thread: Core.step] -> one call per step back to the loop -> streams
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from dynamo.contract.args import worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.embedding import Embedding, EmbedRequest
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk, usage
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import Cancelled, DynamoException, EngineShutdown, InvalidArgument
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.protocol.records import LABELS, RESUMES_GUIDED
from dynamo.reference.blocks import BlockEvent, BlocksStored
from dynamo.reference.core import Core
from dynamo.reference.flags import read_arguments
from dynamo.reference.handover import with_tokens
from dynamo.reference.job_stream import JobStream
from dynamo.reference.kv_transfer import Ticket, TransferOptions
from dynamo.reference.loading import Options, load_core
from dynamo.reference.media import NO_MEDIA, MediaOptions, MediaPrompt
from dynamo.reference.operations import CONTROLS, UPDATES, Operations
from dynamo.reference.pooling import read_inputs
from dynamo.reference.request import Limits, read_request
from dynamo.reference.roles import DecodeRole, PrefillRole, RoleOptions
from dynamo.reference.threads import Preparation, StepThread
from dynamo.reference.token_routes import DECLARED, in_sglang_shapes, sglang_request
from dynamo.reference.vector_stream import VectorStream
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.metrics import TypedFamily
from dynamo.worker.kv_publishing.publisher import (
    ComponentSnapshot,
    KvEventPublisher,
    KvEventSource,
    PushSource,
    SnapshotPublisher,
)

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint

# What the router learns of the engine: its KV blocks as they change, and its load.


class EngineReports:
    """Publishes to the publishers that were attached."""

    def __init__(self) -> None:
        self.events: KvEventPublisher | None = None
        self.snapshots: SnapshotPublisher | None = None
        self._last_snapshot: ComponentSnapshot | None = None

    def attach_events(self, publisher: KvEventPublisher) -> None:
        self.events = publisher

    def publish(self, events: Sequence[BlockEvent], core: Core) -> None:
        """Publish what changed; called by the step thread, after every step and before its results go out."""
        if self.events is not None and events:
            self.events.publish_batch([_published(event, core.pool.block_size) for event in events])
        used, total = core.pool.held, core.pool.blocks
        snapshot = ComponentSnapshot(used, total, used / total, 0, core.hit_rate)
        if self.snapshots is not None and snapshot != self._last_snapshot:
            self._last_snapshot = snapshot
            self.snapshots.publish(0, snapshot)


def _published(event: BlockEvent, block_size: int) -> dict[str, object]:
    if not isinstance(event, BlocksStored):  # a cleared cache is every block of it removed
        return {"type": "removed", "block_hashes": event.block_hashes}
    return {
        "type": "stored",
        "token_ids": event.token_ids,
        "num_block_tokens": [block_size],
        "block_hashes": [event.block_hash],
        "parent_hash": event.parent_hash,
        "lora_name": event.key.lora_name,
        "cache_salt": event.key.cache_salt,
    }


GUIDED_REFUSALS: Final = "reference_guided_refused_total"


class ReferenceEngine(LLMEngine):
    """Serves a Llama, Qwen2 or Qwen3 model from a directory, on the CPU, in float32."""

    def __init__(
        self,
        directory: Path,
        options: Options | None = None,
        *,
        served_model_name: str | None = None,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        transfer: TransferOptions | None = None,
        require_prefill_result: bool = False,
        media: MediaOptions | None = None,
    ) -> None:
        """`mode`: what this worker does of a request; `transfer` and `require_prefill_result` are for prefill and decode
        workers. `media`: what stands for the media of a request; None: they are refused. Raises InvalidArgument."""
        if mode is DisaggregationMode.ENCODE:
            raise InvalidArgument("the encode role has an engine of its own: dynamo.reference.encoder.ReferenceEncoder")
        self._directory, self._options = directory, options or Options()
        self._role_options = RoleOptions(
            mode, transfer or TransferOptions(), require_prefill_result, media or MediaOptions(mode=mode)
        )
        self._role: PrefillRole | DecodeRole | None = None  # None: it serves whole requests
        self._name = served_model_name or directory.resolve().name
        self._steps: StepThread | None = None
        self._preparation: Preparation | None = None
        self._operations: Operations | None = None
        self._config: EngineConfig | None = None
        self._streams: dict[str, list[JobStream | VectorStream]] = {}  # by context id; clients may repeat one
        self._reports = EngineReports()
        self._is_closed = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        args, options, role = read_arguments(argv)
        engine = cls(
            args.model,
            options,
            served_model_name=args.served_model_name,
            mode=role.mode,
            transfer=role.transfer,
            require_prefill_result=role.require_prefill_result,
            media=role.media,
        )
        config = worker_config_from(args, model_name=str(engine._directory), served_model_name=engine._name)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up; make a new one")
        if self._config is not None:
            return self._config
        core = await asyncio.to_thread(load_core, self._directory, self._options)
        self._check_open()  # it may have been cleaned up while the model was read
        role = await self._role_options.make(core.cache)
        try:
            self._check_open()
        except EngineShutdown:
            if role is not None:
                await role.close()
            raise
        self._role = role
        self._preparation = Preparation(
            self._directory, core.limits, compile_seconds=self._options.guided_compile_seconds
        )
        self._steps = StepThread(core, asyncio.get_running_loop(), self._reports.publish, self._fail)
        self._operations = Operations(
            self._directory,
            core.model.config,
            self._steps,
            cache_tokens=core.pool.blocks * core.pool.block_size,
            max_loras=self._options.max_loras,
            may_sleep=self._prefill is None or self._role_options.transfer.transport != "nixl",
        )
        self._config = EngineConfig(
            model=self._name,
            served_model_name=self._name,
            context_length=core.limits.context_length,
            kv_cache_block_size=core.pool.block_size,
            total_kv_blocks=core.pool.blocks,
            max_num_seqs=self._options.max_num_seqs,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
            max_gpu_lora_count=self._options.max_loras or None,
            runtime_data={
                RESUMES_GUIDED: True,
                **(DECLARED if core.limits.generates else {}),
                **self._role_options.media.declaration(core.limits.vision),
                **_labels(core.limits.pooling.labels),
            },
        )
        return self._config

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up while it started")

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        chunks, asked = self._generate(request, context), sglang_request(request)
        if asked is None or self._prefill is not None:  # what that hands over stays in the shape that routers read
            return chunks
        return in_sglang_shapes(chunks, asked, len(request["token_ids"]))

    async def _generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        steps, operations = self._steps, self._operations
        if steps is None or operations is None or self._is_closed:
            raise EngineShutdown("the reference engine is not running")
        operations.check_serving()
        prefill, decode = self._prefill, self._decode
        ticket = None if decode is None else decode.ticket(request)
        if decode is None and request.get("prefill_result"):
            raise InvalidArgument("prefill_result is set, but this worker is no decode worker")
        narrowed = request if prefill is None else prefill.narrowed(request)
        try:
            media = await self._media(request, steps.limits, context)
        except Cancelled:
            yield final_chunk("cancelled", usage=usage(len(request["token_ids"]), 0))
            return
        if ticket is not None:
            media = MediaPrompt(ticket.media_token_ids, ticket.media_hashes)
        job = read_request(
            narrowed, steps.limits, prompt_tokens=context.prompt_tokens, adapters=operations.adapters, media=media
        )
        if decode is not None and ticket is not None:
            job = decode.continued(job, request, ticket)
        if job.needs_steering and self._preparation is not None:
            if job.guided is not None:
                await self._preparation.compile(job.guided)
            job = await asyncio.to_thread(self._preparation.prepare, job)
        stream = JobStream(job)
        self._streams.setdefault(context.id(), []).append(stream)
        holds_blocks = prefill is not None  # beyond the last chunk, until they are handed over
        try:
            arrives = decode is not None and ticket is not None and decode.can_take(job, ticket, context)
            if not context.is_stopped():
                opened = partial(stream.open, results=steps.results, keep=prefill is not None, arrives=arrives)
                steps.submit(opened)
            if decode is not None and ticket is not None:
                await self._receive(decode, ticket, stream, steps, context, arrives=arrives)
            while not stream.is_complete:
                if not context.is_stopped() and not stream.has_chunks:
                    await stream.wait()
                if context.is_stopped():
                    for chunk in stream.cancelled():
                        yield chunk
                    return
                for chunk in stream.take():
                    if prefill is not None and chunk.get("finish_reason") == "length":
                        let_go = partial(steps.submit_if_running, partial(stream.abort, results=steps.results))
                        chunk["disaggregated_params"] = prefill.hand_over(stream.choice, let_go, media)
                        holds_blocks = False
                    yield chunk
        finally:
            self._forget(context, stream)
            if not stream.is_complete or holds_blocks:
                steps.submit_if_running(partial(stream.abort, results=steps.results))

    async def embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[Embedding, None]:
        steps, operations = self._steps, self._operations
        if steps is None or operations is None or self._is_closed:
            raise EngineShutdown("the reference engine is not running")
        operations.check_serving()
        stream = VectorStream(read_inputs(request, steps.limits, operations.adapters))
        self._streams.setdefault(context.id(), []).append(stream)
        try:
            await steps.ask(partial(stream.open, vectors=steps.vectors))
            while not stream.is_complete and not context.is_stopped():
                await stream.wait()
                for vector in stream.take():
                    yield vector
        finally:
            self._forget(context, stream)
            if not stream.is_complete:
                steps.submit_if_running(partial(stream.abort, vectors=steps.vectors))

    def _forget(self, context: Context, stream: JobStream | VectorStream) -> None:
        siblings = self._streams[context.id()]
        siblings.remove(stream)
        if not siblings:
            del self._streams[context.id()]

    async def _media(self, request: GenerateRequest, limits: Limits, context: Context) -> MediaPrompt:
        """Return what stands for the media of a request in its prompt. Raises Cancelled once the context is stopped."""
        if not request.get("multi_modal_data") and request.get("encoder_result") is None:
            return NO_MEDIA
        see = self._role_options.media.prompt_of
        request = await with_tokens(request)
        return await asyncio.to_thread(see, request, limits.vocab_size, limits.vision, context.is_stopped)

    async def _receive(
        self,
        decode: DecodeRole,
        ticket: Ticket,
        stream: JobStream,
        steps: StepThread,
        context: Context,
        *,
        arrives: bool,
    ) -> None:
        """Get the prompt's blocks, or let the peer know that they are not needed. The peer holds none on return."""
        choice = await stream.reserved(context) if arrives else None
        if choice is None:
            await decode.release(ticket)
        else:
            tokens = await decode.fetch(ticket, choice, context)
            steps.submit_if_running(lambda core: core.received(choice, tokens))
        context.notify_first_token()  # an abort loses nothing any more

    @property
    def _prefill(self) -> PrefillRole | None:
        return self._role if isinstance(self._role, PrefillRole) else None

    @property
    def _decode(self) -> DecodeRole | None:
        return self._role if isinstance(self._role, DecodeRole) else None

    async def is_quiescent(self) -> bool | None:
        """Return whether no decode worker may fetch blocks any more; prefill workers check this before they leave."""
        return self._prefill is None or self._prefill.is_quiescent

    async def abort(self, context: Context) -> None:
        """Wake the request, which may be waiting for its turn; its generator sees that the context is stopped."""
        for stream in self._streams.get(context.id(), ()):
            stream.wake()

    async def cleanup(self) -> None:
        self._is_closed = True
        steps = self._steps
        closing = EngineShutdown("the reference engine is shutting down")
        self._fail(closing)
        if self._role is not None:
            await self._role.close()
        if self._preparation is not None:
            self._preparation.close()
        if steps is not None:
            await asyncio.to_thread(steps.close)
            steps.answer_nobody(closing)

    def _fail(self, error: DynamoException) -> None:
        """End every request; another worker may continue it."""
        for streams in self._streams.values():
            for stream in streams:
                stream.fail(error)

    # -- what an operator requests ------------------------------------------------------------------------------------

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        if self._operations is not None:
            self._operations.endpoint = endpoint

    def supported_controls(self) -> set[str]:
        return set(CONTROLS)

    def supported_updates(self) -> set[str]:
        return set(UPDATES)

    async def validate_engine_control(self, name: str, body: JsonObject) -> JsonObject | None:
        return None if self._operations is None else self._operations.refusal(name, body)

    async def engine_control(self, name: str, body: dict[str, object]) -> dict[str, object]:
        if self._operations is None:
            return await super().engine_control(name, body)
        return await self._operations.control(name, body)

    async def engine_update(self, name: str, body: JsonObject) -> JsonObject:
        if self._operations is None:
            return await super().engine_update(name, body)
        return await self._operations.update(name, body)

    async def register_prometheus(self, metrics: Any) -> None:
        if self._role is not None:
            metrics.register_prometheus_typed_callback(partial(self._role.metrics, metrics.auto_labels))
        metrics.register_prometheus_typed_callback(partial(self._refusals, metrics.auto_labels))

    def _refusals(self, labels: Mapping[str, str]) -> list[TypedFamily]:
        counts = {} if self._preparation is None else self._preparation.refusals
        samples = [(GUIDED_REFUSALS, [*labels.items(), ("reason", reason)], count) for reason, count in counts.items()]
        return [(GUIDED_REFUSALS, "Requests refused for their grammar, by why", "counter", samples)]

    # -- what the worker calls -------------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, object] | None:
        bos = None if self._steps is None else self._steps.bos_token_id
        return build_health_check_payload(bos or 0)

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._reports.attach_events, dp_rank=0)] if self._options.prefix_caching else []

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._reports.snapshots = publisher


def _labels(labels: Sequence[str]) -> JsonObject:
    """Return what the model's card has of its classes, which the frontend names in answers."""
    return {LABELS: list(labels)} if labels else {}
