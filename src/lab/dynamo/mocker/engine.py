"""The mock engine behind the contract: a scheduler, a KV cache and a model of time, without a model.

request -> `generate` -> [passes in real time] -> one stream for each request -> chunks, and KV events and load to routers
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Final, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import (
    CompletionUsage,
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    MetricsHandle,
    final_chunk,
    usage,
)
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.kv_events import KvEventSource
from dynamo.contract.requests.dp_rank import forced_dp_rank
from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.errors import Disconnected, EngineShutdown, InvalidArgument
from dynamo.mocker.bootstrap import HandoffDesk, fetch_prompt, room_of
from dynamo.mocker.configuration import MockOptions
from dynamo.mocker.engine_wire import EngineWire
from dynamo.mocker.output import ResponseTrace, prompt_seed, random_ids
from dynamo.mocker.pass_loop import PassLoop
from dynamo.mocker.reports import MockMetrics, MockReports
from dynamo.mocker.settings import BOOTSTRAP_HOST
from dynamo.mocker.stream import MockStream
from dynamo.runtime.base.addresses import LOOPBACK, detect_host
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.calls.context import Context, on_loop
from dynamo.scheduling import PassPlan, PassResult, RankGroup, ScheduledRequest, make_core

if TYPE_CHECKING:
    from dynamo.runtime.endpoint import Endpoint
    from dynamo.worker.kv_publishing.publisher import SnapshotPublisher

logger = logging.getLogger(__name__)

REPLAY_ANNOTATION: Final = "output_replay_id:"
REJECTED: Final = "request rejected: request exceeds worker admission limits"
HANDOFF: Final = {"mocker": True}  # what a prefill worker hands over; a decode worker needs nothing of it


class MockEngine(LLMEngine):
    """One worker of the mocker, with all its data-parallel ranks."""

    def __init__(self, model: str, options: MockOptions | None = None, *, seed: int | None = None) -> None:
        """`seed`: of what this worker's drafts are accepted; None: that of the options, which token ids always follow."""
        self._model = model
        self._options = options or MockOptions()
        self._seed = self._options.seed if seed is None else seed
        self._turn = count()  # of the ranks, for requests without one
        self._group: RankGroup | None = None
        self._passes: PassLoop | None = None
        self._metrics: MockMetrics | None = None
        self._reports: MockReports | None = None
        self._trace: ResponseTrace | None = None
        self._desk: HandoffDesk | None = None
        self._streams: set[MockStream] = set()
        self._is_closed = False

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        from dynamo.mocker.arguments import read_arguments

        fleet = read_arguments(argv)
        if len(fleet.workers) != 1:
            raise InvalidArgument("several workers in one process are started by `python -m dynamo.mocker`")
        (worker,) = fleet.workers
        return cls(worker.model, worker.options, seed=worker.seed), worker.config

    async def start(self, worker_id: int) -> EngineConfig:
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up; make a new one")
        if self._passes is not None:
            raise EngineShutdown("this engine was started before")
        options = self._options
        scheduler = options.scheduler
        if options.response_trace is not None:
            self._trace = await asyncio.to_thread(ResponseTrace.read, options.response_trace)
        if options.startup_seconds:
            await asyncio.sleep(options.startup_seconds)
        if self._is_closed:
            raise EngineShutdown("this engine was cleaned up while it started")
        cores = [make_core(scheduler, options.timing, seed=self._seed + rank) for rank in range(options.dp_size)]
        self._group = RankGroup(cores)
        self._metrics = MockMetrics(scheduler.backend, self._model, cores)
        self._reports = MockReports(
            cores, lambda: None if self._metrics is None else self._metrics.hit_rate, self._wires()
        )
        host, port = await self._open_desk()
        self._passes = PassLoop(self._group, self._deliver, self._on_failure)
        return EngineConfig(
            model=self._model,
            served_model_name=self._model,
            context_length=scheduler.max_model_len,
            kv_cache_block_size=scheduler.block_size,
            total_kv_blocks=scheduler.num_gpu_blocks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            data_parallel_size=options.dp_size,
            bootstrap_host=host,
            bootstrap_port=port,
            runtime_data={"output_replay_consumer": "true"} if self._trace is not None else {},
        )

    def _wires(self) -> list[EngineWire]:
        options = self._options
        events, replay = options.zmq_kv_events_port, options.zmq_replay_port
        if events is None or not options.has_kv_events:
            return []
        wires: list[EngineWire] = []
        try:
            for rank in range(options.dp_size):
                again = None if replay is None else replay + rank
                wires.append(EngineWire(rank, options.scheduler.block_size, options.listen_host, events + rank, again))
        except BaseException:
            for wire in wires:
                wire.close()
            raise
        return wires

    async def _open_desk(self) -> tuple[str | None, int | None]:
        """Listen for decode workers, where this prefill worker has a bootstrap port; return the address to advertise."""
        options = self._options
        if options.bootstrap_port is None or options.scheduler.role != "prefill":
            return None, None
        is_local = options.listen_host == LOOPBACK
        host = BOOTSTRAP_HOST.value(os.environ) or (LOOPBACK if is_local else detect_host())
        self._desk = HandoffDesk(options.scheduler.max_num_seqs * options.dp_size, options.handoff_session_seconds)
        return host, await self._desk.start(options.listen_host, options.bootstrap_port)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        passes = self._passes
        if passes is None or self._is_closed:
            raise EngineShutdown("the mock engine is not running")
        prompt = token_ids_to_list(request["token_ids"])
        prompt_tokens = len(prompt) if context.prompt_tokens is None else context.prompt_tokens
        shown = len(prompt) - prompt_tokens  # by a worker before this one
        wanted = self._wanted(request)
        if not wanted or context.is_stopped():
            reason = "cancelled" if context.is_stopped() else "length"
            yield final_chunk(reason, usage=usage(prompt_tokens, shown))
            return
        stream, scheduled = self._scheduled(request, context, prompt, shown, wanted)
        self._streams.add(stream)
        forget = context.on_cancel(on_loop(asyncio.get_running_loop(), stream.wake))
        room: int | None = None
        last: list[int] = []
        is_first = True
        try:
            room = await self._meet(request, context, stream)
            if not context.is_stopped():
                passes.submit(stream.rank, scheduled)
            while not last and not context.is_stopped():
                await stream.wait()
                if context.is_stopped():
                    break
                arrived, stream.arrived = stream.arrived, []
                if stream.is_complete:
                    last = [arrived.pop()]
                for token_id in arrived:
                    shown += 1
                    if is_first:
                        is_first = False
                        counts = _counts(prompt_tokens, shown, scheduled)
                        yield {"token_ids": [token_id], "index": 0, "completion_usage": counts}
                    else:
                        yield {"token_ids": [token_id], "index": 0}
            is_prefill = self._options.scheduler.role == "prefill"
            if is_prefill and last and (delay := self._options.transfer.seconds(len(prompt))):
                await asyncio.sleep(delay)
            if context.is_stopped():
                yield final_chunk("cancelled", usage=_counts(prompt_tokens, shown, scheduled))
                return
            if room is not None and self._desk is not None:
                self._desk.complete(room)
            counts = _counts(prompt_tokens, shown + 1, scheduled)
            yield final_chunk("length", last, usage=counts, disaggregated_params=HANDOFF if is_prefill else None)
        finally:
            forget()
            self._streams.discard(stream)
            passes.cancel(stream.rank, scheduled)
            if room is not None and self._desk is not None:
                self._desk.end(room)

    # -- one request ----------------------------------------------------------------------------------------------------

    def _wanted(self, request: GenerateRequest) -> int:
        """Return how many tokens to generate. Raises InvalidArgument where the request has no limit."""
        if self._options.scheduler.role == "prefill":
            return 1
        wanted = (request.get("stop_conditions") or {}).get("max_tokens")
        if wanted is None:
            raise InvalidArgument(
                "stop_conditions.max_tokens: the mock engine needs max_tokens, for nothing else ends an answer"
            )
        return wanted

    def _scheduled(
        self, request: GenerateRequest, context: Context, prompt: list[int], shown: int, wanted: int
    ) -> tuple[MockStream, ScheduledRequest]:
        rank = self._rank(request)
        routing = request.get("routing") or {}
        stream = MockStream(rank, prompt, time.monotonic())
        scheduled = ScheduledRequest.of_tokens(
            context.id(),
            prompt,
            wanted,
            self._options.scheduler.block_size,
            self._output(request, context, shown, wanted),
            owner=stream,
            lora_name=routing.get("lora_name"),
            cache_salt=routing.get("cache_salt"),
        )
        scheduled.prompt_arrives = bool(request.get("bootstrap_info") or request.get("prefill_result"))
        return stream, scheduled

    async def _meet(self, request: GenerateRequest, context: Context, stream: MockStream) -> int | None:
        """Begin the hand-off of a request with bootstrap: a decode worker waits here until its prompt has come. A prefill
        worker returns the room that `complete` needs.
        """
        info = request.get("bootstrap_info")
        if not info:
            return None
        if self._desk is not None:
            room = room_of(info)
            lost = partial(stream.fail, Disconnected("the decode worker left before its prompt was computed"))
            self._desk.open(room, stream.rank, lost)
            return room
        if self._options.scheduler.role == "decode":
            # `stream` has no tokens yet: waiting for it ends when the engine is cleaned up.
            await first_of(fetch_prompt(info), context.async_killed_or_stopped(), stream.wait())
            context.notify_first_token()  # from here on an abort loses nothing that was computed for another worker
        return None

    def _rank(self, request: GenerateRequest) -> int:
        size = self._options.dp_size
        rank = forced_dp_rank(request)
        if rank is None:
            return next(self._turn) % size
        if not 0 <= rank < size:
            raise InvalidArgument(f"dp_rank {rank} is out of bounds for dp_size {size}")
        return rank

    def _output(self, request: GenerateRequest, context: Context, shown: int, wanted: int) -> Iterator[int]:
        """Yield the ids of an answer, the first `shown` of which came from another worker.

        They depend on the prompt and on the seeds of the engine and of the request, or on the request's id, so that any
        worker can continue the answer, and a worker that got another prompt cannot.
        """
        seed = (request.get("sampling_options") or {}).get("seed")
        prompt = token_ids_to_list(request["token_ids"])
        of_prompt = prompt_seed(prompt[: len(prompt) - shown])
        ids = random_ids(f"{self._options.seed}:{context.id() if seed is None else seed}:{of_prompt}")
        if self._trace is not None:
            key = next((a for a in request.get("annotations") or () if a.startswith(REPLAY_ANNOTATION)), None)
            if key is not None:
                found = self._trace.find(key.removeprefix(REPLAY_ANNOTATION))
                if found is not None:
                    return chain(found[shown:], ids)
                logger.warning("request %s: the replay trace has no %s; it gets random tokens", context.id(), key)
        shape = self._options.reasoning
        if shape is not None and self._group is not None:
            room = self._group.cores[0].output_room(len(request["token_ids"]))
            ids = shape.shaped(ids, shown + min(wanted, room))
        return islice(ids, shown, None)

    # -- one pass -------------------------------------------------------------------------------------------------------

    def _deliver(
        self, plans: Sequence[tuple[int, PassPlan]], results: Sequence[tuple[int, PassResult]], now: float
    ) -> None:
        metrics, reports = self._metrics, self._reports
        assert metrics is not None
        assert reports is not None
        between = metrics.between_tokens
        for _, result in results:
            for request in result.emitted:
                stream = request.owner
                assert type(stream) is MockStream
                if request.burst == 1:
                    stream.arrived.append(request.tail[-1])  # type: ignore[index]
                else:
                    stream.arrived += request.tail[-request.burst :]  # type: ignore[index]
                if stream.last_at:
                    between.observe(now - stream.last_at)
                stream.last_at = now
                stream.wake()
            for request in result.first:
                metrics.on_first_token(request)
                metrics.first_token.observe(now - _stream_of(request).began_at)
            for request in result.finished:
                stream = _stream_of(request)
                stream.is_complete = True
                metrics.whole.observe(now - stream.began_at)
            for request in result.rejected:
                _stream_of(request).fail(InvalidArgument(REJECTED))
        metrics.on_pass()
        reports.publish(results)

    def _on_failure(self, error: Exception) -> None:
        self._end_streams(EngineShutdown(f"the mock engine failed: {type(error).__name__}: {error}"))

    def _end_streams(self, error: EngineShutdown) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.fail(error)

    async def cleanup(self) -> None:
        self._end_streams(EngineShutdown("the mock engine is shutting down"))
        if self._passes is not None:
            self._passes.close()
        if self._desk is not None:
            await self._desk.close()
        if self._reports is not None:
            await self._reports.close()

    # -- what the worker calls ------------------------------------------------------------------------------------------

    async def register_prometheus(self, metrics: MetricsHandle) -> None:
        if self._metrics is not None:
            metrics.register_prometheus_expfmt_callback(self._metrics.text)

    async def health_check_payload(self) -> dict[str, object] | None:
        return build_health_check_payload(1)

    async def on_endpoint_ready(self, endpoint: Endpoint) -> None:
        if self._reports is not None:
            self._reports.attach_endpoint(endpoint)

    async def kv_event_sources(self) -> list[KvEventSource]:
        if self._reports is None or not self._options.has_kv_events:
            return []
        return self._reports.sources(self._options.zmq_kv_events_port)

    def component_metrics_dp_ranks(self) -> list[int]:
        return list(range(self._options.dp_size))

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        if self._reports is not None:
            self._reports.snapshots = publisher


def _stream_of(request: ScheduledRequest) -> MockStream:
    stream = request.owner
    assert type(stream) is MockStream
    return stream


def _counts(prompt_tokens: int, shown: int, request: ScheduledRequest) -> CompletionUsage:
    cached = request.cached_tokens
    return usage(prompt_tokens, shown, cached_tokens=None if cached < 0 else min(cached, prompt_tokens))
