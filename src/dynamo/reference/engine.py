"""The reference engine behind the contract: one thread computes steps, the event loop only hands their results on.

request -> `generate` -> inbox -> [step thread: Core.step] -> one call per step back to the loop -> streams
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from dynamo.common.backend.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.common.backend.chunks import CompletionUsage, TopLogprob
from dynamo.common.backend.config import WorkerConfig
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk, usage
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import (
    ComponentSnapshot,
    KvEventPublisher,
    KvEventSource,
    PushSource,
    SnapshotPublisher,
)
from dynamo.common.constants import DisaggregationMode
from dynamo.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo.reference.blocks import BlockEvent, BlocksStored
from dynamo.reference.core import Choice, Core, Emission, Failure
from dynamo.reference.loading import Options, load_core
from dynamo.reference.preparing import Preparation
from dynamo.reference.request import Job, read_request
from dynamo.runtime.context import Context

__all__ = ["ReferenceEngine"]

logger = logging.getLogger(__name__)

Command = Callable[[Core], None]  # something to do between two steps

IDLE_SECONDS: Final = 5.0  # an idle thread looks this often whether it is still wanted; everything else wakes it


class ReferenceEngine(LLMEngine):
    """Serves a Llama, Qwen2 or Qwen3 model from a directory, on the CPU, in float32."""

    def __init__(
        self, directory: Path, options: Options | None = None, *, served_model_name: str | None = None
    ) -> None:
        self._directory, self._options = directory, options or Options()
        self._name = served_model_name or directory.resolve().name
        self._steps: StepThread | None = None
        self._preparation: Preparation | None = None
        self._config: EngineConfig | None = None
        self._streams: dict[str, list[_Stream]] = {}  # by context id; clients may repeat one
        self._events: KvEventPublisher | None = None
        self._snapshots: SnapshotPublisher | None = None
        self._last_snapshot: ComponentSnapshot | None = None
        self._is_closed = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        parser = BackendArgumentParser("dynamo.reference", description="An inference engine in NumPy.")
        _add_flags(parser)
        add_backend_arguments(parser)
        args = parser.parse_args(argv)
        if args.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            parser.error(f"--disaggregation-mode {args.disaggregation_mode.value} is not supported yet; use agg")
        try:
            options = Options(
                block_size=args.block_size,
                kv_cache_mb=args.kv_cache_mb,
                context_length=args.context_length,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                prefix_caching=not args.no_prefix_caching,
            )
        except InvalidArgument as error:
            parser.error(str(error))
        engine = cls(args.model, options, served_model_name=args.served_model_name)
        config = worker_config_from(args, model_name=str(engine._directory), served_model_name=engine._name)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up; make a new one")
        if self._config is not None:
            return self._config
        core = await asyncio.to_thread(load_core, self._directory, self._options)
        if self._is_closed:  # cleaned up while the model was read
            raise EngineShutdown("this engine was cleaned up while it started")
        self._preparation = Preparation(self._directory, core.limits)
        self._steps = StepThread(core, asyncio.get_running_loop(), self._publish, self._fail)
        self._config = EngineConfig(
            model=self._name,
            served_model_name=self._name,
            context_length=core.limits.context_length,
            kv_cache_block_size=core.pool.block_size,
            total_kv_blocks=core.pool.blocks,
            max_num_seqs=self._options.max_num_seqs,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
        )
        return self._config

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        steps = self._steps
        if steps is None or self._is_closed:
            raise EngineShutdown("the reference engine is not running")
        job = read_request(request, steps.limits, prompt_tokens=context.prompt_tokens)
        if job.needs_steering and self._preparation is not None:
            job = await asyncio.to_thread(self._preparation.prepare, job)
        stream = _Stream(job)
        self._streams.setdefault(context.id(), []).append(stream)
        try:
            if not context.is_stopped():
                steps.submit(partial(stream.open, results=steps.results))
            while not stream.is_complete:
                if not context.is_stopped() and not stream.has_chunks:
                    await stream.wait()
                if context.is_stopped():
                    for chunk in stream.cancelled():
                        yield chunk
                    return
                for chunk in stream.take():
                    yield chunk
        finally:
            siblings = self._streams[context.id()]
            siblings.remove(stream)
            if not siblings:
                del self._streams[context.id()]
            if not stream.is_complete:
                with suppress(EngineShutdown):  # an engine that is gone holds no blocks
                    steps.submit(partial(stream.abort, results=steps.results))

    async def abort(self, context: Context) -> None:
        """Wake the request, which may be waiting for its turn; its generator sees that the context is stopped."""
        for stream in self._streams.get(context.id(), ()):
            stream.wake()

    async def cleanup(self) -> None:
        self._is_closed = True
        steps = self._steps
        self._fail(EngineShutdown("the reference engine is shutting down"))
        if steps is not None:
            await asyncio.to_thread(steps.close)

    def _fail(self, error: DynamoException) -> None:
        """End every request; another worker may continue it."""
        for streams in self._streams.values():
            for stream in streams:
                stream.fail(error)

    # -- what the worker asks for -------------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, Any] | None:
        bos = None if self._steps is None else self._steps.bos_token_id
        return build_health_check_payload(bos or 0)

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [PushSource(on_ready=self._attach_events, dp_rank=0)] if self._options.prefix_caching else []

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._snapshots = publisher

    def _attach_events(self, publisher: KvEventPublisher) -> None:
        self._events = publisher

    def _publish(self, events: Sequence[BlockEvent], core: Core) -> None:
        """Tell the router what changed; called by the step thread, after every step and before its results go out."""
        if self._events is not None and events:
            self._events.publish_batch([_published(event, core.pool.block_size) for event in events])
        used, total = core.pool.held, core.pool.blocks
        snapshot = ComponentSnapshot(used, total, used / total, 0, core.hit_rate)
        if self._snapshots is not None and snapshot != self._last_snapshot:
            self._last_snapshot = snapshot
            self._snapshots.publish(0, snapshot)


class StepThread:
    """Runs a core's steps in a thread of its own, and delivers what they yield on the event loop: one call a step."""

    def __init__(
        self,
        core: Core,
        loop: asyncio.AbstractEventLoop,
        after_step: Callable[[Sequence[BlockEvent], Core], None],
        on_failure: Callable[[DynamoException], None],
    ) -> None:
        """`after_step` is called in the thread, `on_failure` at most once on the loop: no step comes after it."""
        self.limits = core.limits
        self.bos_token_id = core.model.config.bos_token_id
        self.results: dict[Choice, _Stream] = {}  # of the choices on their way; touched by the thread only
        self._core, self._loop = core, loop
        self._after_step, self._on_failure = after_step, on_failure
        self._inbox: list[Command] = []  # bounded by the requests in flight: two commands each
        self._wake = threading.Condition()
        self._is_closing = False
        self._failure: DynamoException | None = None
        self._thread = threading.Thread(target=self._run, name="reference-steps", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Run `command` between two steps. Raises EngineShutdown where no step will come."""
        with self._wake:
            if self._failure is not None:
                raise EngineShutdown(str(self._failure)) from self._failure
            self._inbox.append(command)
            self._wake.notify()

    def close(self) -> None:
        """End the thread after the step it is in. Blocks until then; safe twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (commands := self._next()) is not None:
                for command in commands:
                    command(self._core)
                emissions = self._core.step()
                self._tell()
                if emissions:
                    self._deliver(emissions)
        except Exception as error:  # the cache may be half written: nothing after this could be trusted
            logger.exception("the reference engine failed; its requests end")
            failure = EngineShutdown(f"the reference engine failed: {type(error).__name__}: {error}")
            with self._wake:
                self._failure = failure
            self._call([partial(self._on_failure, failure)])

    def _next(self) -> list[Command] | None:
        """What to do before the next step, once there is one to make; None: end."""
        with self._wake:
            while not self._is_closing and not self._inbox and self._core.is_idle:
                self._wake.wait(IDLE_SECONDS)
            commands, self._inbox = self._inbox, []
            return None if self._is_closing else commands

    def _tell(self) -> None:
        try:
            self._after_step(self._core.take_events(), self._core)
        except Exception:  # an event less is a worse placement, not a wrong answer
            logger.exception("the reference engine's KV events were not published")

    def _deliver(self, emissions: Sequence[Emission | Failure]) -> None:
        calls: list[Callable[[], None]] = []
        for emission in emissions:
            stream = self.results[emission.choice]
            if isinstance(emission, Failure):
                del self.results[emission.choice]
                calls.append(partial(stream.fail, emission.error))
                continue
            if emission.reason is not None:
                del self.results[emission.choice]
            calls.append(partial(stream.put, _chunk(emission), emission))
        self._call(calls)

    def _call(self, calls: Sequence[Callable[[], None]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_each, calls)
        except RuntimeError:  # the loop is closed, so nobody is waiting
            logger.debug("results of a last step had no event loop to go to")


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _Stream:
    """One request between the step thread and its generator. Used on the loop, except `open` and `abort`.

    What waits here is bounded by the request's own length.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._choices: list[Choice] = []
        self._chunks: deque[GenerateChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: DynamoException | None = None
        self._open = set(range(job.choices))
        self._shown = 0  # tokens taken, of all choices
        self._cached_tokens: int | None = None

    @property
    def is_complete(self) -> bool:
        """Every choice's last chunk was taken."""
        return not self._open

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def open(self, core: Core, results: dict[Choice, _Stream]) -> None:
        self._choices = core.add(self._job)
        results.update(dict.fromkeys(self._choices, self))

    def abort(self, core: Core, results: dict[Choice, _Stream]) -> None:
        core.abort(self._choices)
        for choice in self._choices:
            results.pop(choice, None)

    def put(self, chunk: GenerateChunk, emission: Emission) -> None:
        if self._cached_tokens is None:
            self._cached_tokens = emission.choice.sequence.cached
        self._chunks.append(chunk)
        self.wake()

    def fail(self, error: DynamoException) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until there is a chunk, or somebody woke us. Raises what `fail` was given."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None and not self._chunks:
            raise self._error

    def take(self) -> list[GenerateChunk]:
        """What has arrived. The chunk that ends the last choice counts the whole stream."""
        chunks = list(self._chunks)
        self._chunks.clear()
        for chunk in chunks:
            self._shown += len(chunk["token_ids"])
            if chunk.get("finish_reason") is not None:
                self._open.discard(chunk["index"])
                if not self._open:
                    chunk["completion_usage"] = self._usage()
        return chunks

    def cancelled(self) -> list[GenerateChunk]:
        """The last chunks of a request that was stopped: what had arrived, then the end of every open choice."""
        chunks = self.take()
        for index in sorted(self._open):
            chunks.append(final_chunk("cancelled", index=index))
        if self._open:
            chunks[-1]["completion_usage"] = self._usage()
        return chunks

    def _usage(self) -> CompletionUsage:
        return usage(len(self._job.prompt) - self._job.produced, self._shown, cached_tokens=self._cached_tokens)


def _chunk(emission: Emission) -> GenerateChunk:
    choice, drawn = emission.choice, emission.drawn
    chunk: GenerateChunk = {"token_ids": [drawn.token] if emission.shown else [], "index": choice.number}
    if emission.shown and drawn.logprob is not None:
        chunk["log_probs"] = [drawn.logprob]
        if drawn.top or drawn.asked:
            top: list[TopLogprob] = [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for rank, (token, logprob) in enumerate(drawn.top, 1)
            ]
            top += [
                {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                for token, rank, logprob in drawn.asked
            ]
            chunk["top_logprobs"] = [top]
    if emission.reason is not None:
        chunk["finish_reason"] = emission.reason
        if emission.reason == "stop":
            chunk["stop_reason"] = drawn.token
        if choice.prompt_logprobs is not None:
            entries = [
                {
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": None}
                    for token, rank, logprob in entry
                }
                for entry in choice.prompt_entries
            ]
            chunk["engine_data"] = {"prompt_logprobs": [None, *entries]}
    return chunk


def _published(event: BlockEvent, block_size: int) -> dict[str, Any]:
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


def _add_flags(parser: argparse.ArgumentParser) -> None:
    default = Options()
    add = parser.add_argument_group("reference engine").add_argument
    add(
        "--model",
        "--model-name",
        required=True,
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="directory of a Llama, Qwen2 or Qwen3 model",
    )
    add("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add("--context-length", type=int, metavar="TOKENS", help="longest prompt and answer (default: the model's)")
    add(
        "--block-size", type=int, default=default.block_size, metavar="TOKENS", help="tokens per KV block (default: 16)"
    )
    add(
        "--kv-cache-mb",
        type=int,
        default=default.kv_cache_mb,
        metavar="MB",
        help="memory of the KV cache (default: 256)",
    )
    add(
        "--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N", help="requests in one step (default: 64)"
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        metavar="TOKENS",
        help="tokens in one step; longer prompts are computed in pieces (default: 512)",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its start; publish no KV events")
