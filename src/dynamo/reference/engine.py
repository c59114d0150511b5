"""The reference engine behind the contract: one thread computes steps, the event loop only hands their results on.

request -> `generate` -> inbox -> [step thread: Core.step] -> one call per step back to the loop -> streams
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.chunks import CompletionUsage, TopLogprob
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk, usage
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo.protocol.guided_limits import GuidedLimits
from dynamo.protocol.records import RESUMES_GUIDED
from dynamo.reference import demo
from dynamo.reference.blocks import BlockEvent, BlocksStored
from dynamo.reference.core import Choice, Core, Emission, Failure
from dynamo.reference.guided import COMPILE_SECONDS
from dynamo.reference.kv_transfer import TRANSPORTS, Ticket, TransferOptions, check_installed
from dynamo.reference.loading import Options, load_core
from dynamo.reference.operations import CONTROLS, UPDATES, Operations
from dynamo.reference.preparing import Preparation
from dynamo.reference.request import Job, read_request
from dynamo.reference.roles import ROLES, DecodeRole, PrefillRole
from dynamo.runtime.context import Context, on_loop
from dynamo.runtime.metrics import TypedFamily
from dynamo.runtime.settings import env_float, env_int, env_str
from dynamo.worker.kv_publishing.publisher import (
    ComponentSnapshot,
    KvEventPublisher,
    KvEventSource,
    PushSource,
    SnapshotPublisher,
)

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint

__all__ = ["ReferenceEngine"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

Command = Callable[[Core], None]  # something to do between two steps

GUIDED_REFUSALS: Final = "reference_guided_refused_total"
IDLE_SECONDS: Final = 5.0  # an idle thread looks this often whether it is still wanted; everything else wakes it


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
    ) -> None:
        """`mode`: what this worker does of a request; the last two are for prefill and decode workers."""
        if mode not in ROLES:
            raise InvalidArgument(f"--disaggregation-mode {mode.value}: the reference engine has no such role")
        self._directory, self._options = directory, options or Options()
        self._mode, self._transfer = mode, transfer or TransferOptions()
        self._require_prefill_result = require_prefill_result
        self._prefill: PrefillRole | None = None
        self._decode: DecodeRole | None = None
        self._name = served_model_name or directory.resolve().name
        self._steps: StepThread | None = None
        self._preparation: Preparation | None = None
        self._operations: Operations | None = None
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
        if args.model is None:
            demo.choose(args)
        try:
            options = Options(
                block_size=args.block_size,
                kv_cache_mb=args.kv_cache_mb,
                context_length=args.context_length,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                prefix_caching=not args.no_prefix_caching,
                max_loras=args.max_loras,
                guided=GuidedLimits.read(partial(env_int, minimum=1)),
                guided_compile_seconds=env_float("DYN_GUIDED_COMPILE_SECS", COMPILE_SECONDS, minimum=0.01),
            )
            transfer = TransferOptions(
                args.kv_transfer,
                args.kv_transfer_host or env_str("DYN_TCP_RPC_HOST"),
                args.kv_transfer_port,
                args.kv_hold_seconds,
                args.kv_pull_seconds,
            )
            if args.disaggregation_mode is not DisaggregationMode.AGGREGATED:
                check_installed(transfer)
            engine = cls(
                args.model,
                options,
                served_model_name=args.served_model_name,
                mode=args.disaggregation_mode,
                transfer=transfer,
                require_prefill_result=args.require_prefill_result,
            )
        except InvalidArgument as error:
            parser.error(str(error))
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
        await self._take_role(core)
        self._preparation = Preparation(
            self._directory, core.limits, compile_seconds=self._options.guided_compile_seconds
        )
        self._steps = StepThread(core, asyncio.get_running_loop(), self._publish, self._fail)
        self._operations = Operations(
            self._directory,
            core.model.config,
            self._steps,
            cache_tokens=core.pool.blocks * core.pool.block_size,
            max_loras=self._options.max_loras,
            may_sleep=self._prefill is None or self._transfer.transport != "nixl",
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
            runtime_data={RESUMES_GUIDED: True},
        )
        return self._config

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        steps, operations = self._steps, self._operations
        if steps is None or operations is None or self._is_closed:
            raise EngineShutdown("the reference engine is not running")
        operations.check_serving()
        prefill, decode = self._prefill, self._decode
        ticket = None if decode is None else decode.ticket(request)
        if decode is None and request.get("prefill_result"):
            raise InvalidArgument("prefill_result is set, but this worker is no decode worker")
        narrowed = request if prefill is None else prefill.narrowed(request)
        job = read_request(narrowed, steps.limits, prompt_tokens=context.prompt_tokens, adapters=operations.adapters)
        if decode is not None and ticket is not None:
            job = decode.continued(job, request, ticket)
        if job.needs_steering and self._preparation is not None:
            if job.guided is not None:
                await self._preparation.compile(job.guided)
            job = await asyncio.to_thread(self._preparation.prepare, job)
        stream = _Stream(job)
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
                        let_go = partial(_submit, steps, partial(stream.abort, results=steps.results))
                        chunk["disaggregated_params"] = prefill.hand_over(stream.choice, let_go)
                        holds_blocks = False
                    yield chunk
        finally:
            siblings = self._streams[context.id()]
            siblings.remove(stream)
            if not siblings:
                del self._streams[context.id()]
            if not stream.is_complete or holds_blocks:
                _submit(steps, partial(stream.abort, results=steps.results))

    async def _receive(
        self,
        decode: DecodeRole,
        ticket: Ticket,
        stream: _Stream,
        steps: StepThread,
        context: Context,
        *,
        arrives: bool,
    ) -> None:
        """Get the prompt's blocks, or let the peer know that they are not wanted. The peer holds none on return."""
        choice = await stream.reserved(context) if arrives else None
        if choice is None:
            await decode.release(ticket)
        else:
            tokens = await decode.fetch(ticket, choice, context)
            _submit(steps, lambda core: core.received(choice, tokens))
        context.notify_first_token()  # an abort is nobody's loss any more

    async def _take_role(self, core: Core) -> None:
        """Set up what the role needs. Raises CannotConnect, InvalidArgument; EngineShutdown when cleaned up meanwhile."""
        role: PrefillRole | DecodeRole
        # In a thread, because NIXL takes a second to start.
        if self._mode is DisaggregationMode.DECODE:
            make = partial(DecodeRole, core.cache, self._transfer, required=self._require_prefill_result)
            role = self._decode = await asyncio.to_thread(make)
        elif self._mode is DisaggregationMode.PREFILL:
            role = self._prefill = await asyncio.to_thread(PrefillRole, core.cache, self._transfer)
            await role.start()
        else:
            return
        if self._is_closed:
            await role.close()
            raise EngineShutdown("this engine was cleaned up while it started")

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
        if self._prefill is not None:
            await self._prefill.close()
        if self._decode is not None:
            await self._decode.close()
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

    # -- what an operator asks for ------------------------------------------------------------------------------------

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        if self._operations is not None:
            self._operations.endpoint = endpoint

    def supported_controls(self) -> set[str]:
        return set(CONTROLS)

    def supported_updates(self) -> set[str]:
        return set(UPDATES)

    async def validate_engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._operations is None else self._operations.refusal(name, body)

    async def engine_control(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._operations is None:
            return await super().engine_control(name, body)
        return await self._operations.control(name, body)

    async def engine_update(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._operations is None:
            return await super().engine_update(name, body)
        return await self._operations.update(name, body)

    async def register_prometheus(self, metrics: Any) -> None:
        role = self._prefill or self._decode
        if role is not None:
            metrics.register_prometheus_typed_callback(partial(role.metrics, metrics.auto_labels))
        metrics.register_prometheus_typed_callback(partial(self._refusals, metrics.auto_labels))

    def _refusals(self, labels: Mapping[str, str]) -> list[TypedFamily]:
        counts = {} if self._preparation is None else self._preparation.refusals
        samples = [(GUIDED_REFUSALS, [*labels.items(), ("reason", reason)], count) for reason, count in counts.items()]
        return [(GUIDED_REFUSALS, "Requests refused for their grammar, by why", "counter", samples)]

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
        self._asked: set[asyncio.Future[Any]] = set()  # questions on their way; on the loop only
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
            if self._is_closing:
                raise EngineShutdown("the reference engine is shutting down")
            self._inbox.append(command)
            self._wake.notify()

    async def ask(self, question: Callable[[Core], T]) -> T:
        """Put a question between two steps; its answer, or what it raised. Raises EngineShutdown where no step will come."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def command(core: Core) -> None:
            try:
                result = question(core)
            except Exception as error:  # it is the asker's
                self._call([partial(_settle, answer, answer.set_exception, error)])
            else:
                self._call([partial(_settle, answer, answer.set_result, result)])

        self._asked.add(answer)
        try:
            self.submit(command)
            return await answer
        finally:
            self._asked.discard(answer)

    def answer_nobody(self, error: DynamoException) -> None:
        """Fail every waiting caller with `error`: no step will come. Call it on the loop."""
        for answer in self._asked:
            _settle(answer, answer.set_exception, error)

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
                reserved = self._core.take_reserved()
                if emissions or reserved:
                    self._deliver(emissions, reserved)
        except Exception as error:  # the cache may be half written: nothing after this could be trusted
            logger.exception("the reference engine failed; its requests end")
            failure = EngineShutdown(f"the reference engine failed: {type(error).__name__}: {error}")
            with self._wake:
                self._failure = failure
            self._call([partial(self.answer_nobody, failure), partial(self._on_failure, failure)])

    def _next(self) -> list[Command] | None:
        """Wait for the next step; return what to do before the step; None: end."""
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

    def _deliver(self, emissions: Sequence[Emission | Failure], reserved: Sequence[Choice]) -> None:
        calls: list[Callable[[], None]] = [self.results[choice].reserve for choice in reserved]
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


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():  # its asker may have left
        settle(value)


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
        self._is_reserved = False

    @property
    def choice(self) -> Choice:
        """The first one; known once there was a chunk, or blocks were reserved."""
        return self._choices[0]

    @property
    def is_complete(self) -> bool:
        """Every choice's last chunk was taken."""
        return not self._open

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def open(self, core: Core, results: dict[Choice, _Stream], *, keep: bool = False, arrives: bool = False) -> None:
        self._choices = core.add(self._job, keep=keep, arrives=arrives)
        results.update(dict.fromkeys(self._choices, self))

    def abort(self, core: Core, results: dict[Choice, _Stream]) -> None:
        core.abort(self._choices)
        for choice in self._choices:
            results.pop(choice, None)

    def reserve(self) -> None:
        """Mark the choice's blocks as held; the choice now waits for their content."""
        self._is_reserved = True
        self.wake()

    async def reserved(self, context: Context) -> Choice | None:
        """Wait for that; None when the context is stopped first. Raises what `fail` was given."""
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), lambda killed: self.wake()))
        try:
            while not self._is_reserved and not context.is_stopped():
                await self.wait()
        finally:
            forget()
        return None if context.is_stopped() else self.choice

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
        """Return the chunks that have arrived. The chunk that ends the last choice counts the whole stream."""
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
        """Return the last chunks of a stopped request: those that had arrived, then the end of every open choice."""
        chunks = self.take()
        for index in sorted(self._open):
            chunks.append(final_chunk("cancelled", index=index))
        if self._open:
            chunks[-1]["completion_usage"] = self._usage()
        return chunks

    def _usage(self) -> CompletionUsage:
        return usage(len(self._job.prompt) - self._job.produced, self._shown, cached_tokens=self._cached_tokens)


def _submit(steps: StepThread, command: Command) -> None:
    with suppress(EngineShutdown):  # an engine that is gone holds no blocks
        steps.submit(command)


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
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="directory of a Llama, Qwen2 or Qwen3 model (default: the demonstration model that comes with us)",
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
    add(
        "--kv-transfer",
        choices=TRANSPORTS,
        default="tcp",
        help="how KV blocks get from prefill to decode workers; nixl needs its extra (default: tcp)",
    )
    add(
        "--kv-transfer-host",
        metavar="HOST",
        help="address decode workers fetch from (default: DYN_TCP_RPC_HOST, or this machine's)",
    )
    add("--kv-transfer-port", type=int, default=0, metavar="PORT", help="0 is any free one (default: 0)")
    add(
        "--kv-hold-seconds",
        type=float,
        default=TransferOptions().hold_seconds,
        metavar="SECONDS",
        help="how long a prefill worker holds blocks that nobody fetches (default: 30)",
    )
    add(
        "--kv-pull-seconds",
        type=float,
        default=TransferOptions().pull_seconds,
        metavar="SECONDS",
        help="how long fetching the blocks of one prompt may take (default: 30)",
    )
    add(
        "--require-prefill-result",
        action="store_true",
        help="a decode worker refuses requests without one, instead of computing their prompts",
    )
    add(
        "--max-loras",
        type=int,
        default=default.max_loras,
        metavar="N",
        help="LoRA adapters loaded at once (default: 8)",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its start; publish no KV events")
