"""An engine without a model, to read and to run: every request gets rotating token ids at a steady pace.

    python -m dynamo.engines.sample.main --model-name test-model

What an engine must have is at the top: `from_args`, `start`, `generate`, `cleanup`. Below come the optional parts, one
small function each: log probabilities, disaggregated roles, media, and (in `sample_kv`) KV events and load.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from dynamo.contract import telemetry
from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import (
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    chunk,
    final_chunk,
    usage,
)
from dynamo.contract.health_check import build_health_check_payload, is_probe
from dynamo.contract.kv_events import ComponentSnapshot, KvEventSource, PushSource
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.disaggregation import enforce_prefill_max_tokens, require_prefill_result
from dynamo.contract.requests.invalid import InvalidRequest
from dynamo.contract.requests.multimodal import (
    encoder_terminal_chunk,
    extract_multimodal_kwargs,
    require_encoder_result,
)
from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.engines.native_flags import refuse_media_output
from dynamo.protocol.records import MEDIA_KINDS
from dynamo.runtime.calls.context import Context
from dynamo.worker.kv_publishing.publisher import KvEventPublisher, SnapshotPublisher

__all__ = ["SampleLLMEngine"]


# The KV cache the sample engine pretends to have, and the thread that reports it to the router.
#
# Real engines report their cache from a thread of their own; so does this one. It also shows the two rules of such a
# thread: a failure to publish is logged and survived, and it has ended when `cleanup()` returns.

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 16
TOTAL_BLOCKS: Final = 1000
TICK_SECONDS: Final = 0.1  # how often the load is reported while nothing changes
JOIN_SECONDS: Final = 1.0
MAX_WAITING: Final = 10_000  # changes; past it the newest is dropped, as an at-most-once event may be


@dataclass(frozen=True)
class _Stored:
    token_ids: Sequence[int]
    block_hashes: list[int]


@dataclass(frozen=True)
class _Removed:
    block_hashes: list[int]


_Change = _Stored | _Removed | None  # None: wake up and check whether to stop


class SampleKvCache:
    """Blocks held by running requests. Silent, and without a thread, until a publisher is attached."""

    def __init__(self) -> None:
        self._events: KvEventPublisher | None = None
        self._snapshots: SnapshotPublisher | None = None
        self._changes: queue.Queue[_Change] = queue.Queue(MAX_WAITING)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_hash = itertools.count(1)
        self._used = 0  # blocks; touched by the event loop only, read by the thread

    def attach_events(self, publisher: KvEventPublisher) -> None:
        self._events = publisher
        self._run()

    def attach_snapshots(self, publisher: SnapshotPublisher) -> None:
        self._snapshots = publisher
        self._run()

    @contextmanager
    def blocks_of(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Hold the blocks of one prompt, at least one, while the request runs."""
        hashes = [next(self._next_hash) for _ in range(max(1, len(token_ids) // BLOCK_TOKENS))]
        self._used += len(hashes)
        self._put_change(_Stored(token_ids, hashes))
        try:
            yield
        finally:
            self._used -= len(hashes)
            self._put_change(_Removed(hashes))

    async def close(self) -> None:
        """End the thread, waiting a moment for it. Safe twice, and without a thread."""
        self._stop.set()
        self._put_change(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def _run(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish_loop, name="sample-kv-publisher", daemon=True)
            self._thread.start()

    def _put_change(self, change: _Change) -> None:
        if self._thread is None:
            return
        try:
            self._changes.put_nowait(change)
        except queue.Full:
            logger.debug("sample KV change dropped: the publishing thread is %d changes behind", MAX_WAITING)

    def _publish_loop(self) -> None:
        while not self._stop.is_set():
            try:
                change = self._changes.get(timeout=TICK_SECONDS)
            except queue.Empty:
                change = None
            try:
                self._publish(change)
            except Exception:  # the next change may well get through; without this thread none would
                logger.exception("sample KV publishing failed")

    def _publish(self, change: _Change) -> None:
        match change:
            case _Stored(token_ids, block_hashes) if self._events is not None:
                self._events.publish_stored(
                    _padded(token_ids, len(block_hashes)), [BLOCK_TOKENS] * len(block_hashes), block_hashes
                )
            case _Removed(block_hashes) if self._events is not None:
                self._events.publish_removed(block_hashes)
            case None if self._snapshots is not None:
                used = min(self._used, TOTAL_BLOCKS)  # there is no limit on the requests that run
                self._snapshots.publish(0, ComponentSnapshot(used, TOTAL_BLOCKS, used / TOTAL_BLOCKS, 0, None))


def _padded(token_ids: Sequence[int], blocks: int) -> list[int]:
    """Return the tokens of whole blocks; a prompt shorter than one block is filled up, because a block has a fixed size."""
    size = blocks * BLOCK_TOKENS
    whole = list(token_ids[:size])
    return whole + [0] * (size - len(whole))


VOCABULARY: Final = 32_000
MAX_TOP_LOGPROBS: Final = 20
ENCODER_HANDLE: Final = "sample-encoder:"  # how this engine recognises its own encoder's results

MEDIA: Final = ("image", "video", "audio")  # that requests may carry


class SampleLLMEngine(LLMEngine):
    """Token i of every answer is `(i + 1) % 32000`, one each `delay` seconds."""

    def __init__(
        self,
        model_name: str = "sample-model",
        max_tokens: int = 16,
        delay: float = 0.01,
        disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        route_to_encoder: bool = False,
    ) -> None:
        self.model_name = model_name
        self.max_tokens = max_tokens  # for requests that set no limit
        self.delay = delay  # seconds per token
        self.disaggregation_mode = disaggregation_mode
        self.route_to_encoder = route_to_encoder
        self._kv = SampleKvCache()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        parser = BackendArgumentParser("sample-backend", description="A Dynamo backend that needs no model.")
        parser.add_argument("--model-name", default="sample-model", help="name to serve (default: sample-model)")
        parser.add_argument(
            "--max-tokens", type=int, default=16, help="length of an answer without a limit (default: 16)"
        )
        parser.add_argument("--delay", type=float, default=0.01, help="seconds per token (default: 0.01)")
        add_backend_arguments(parser, component="sample")
        refuse_media_output(argv)
        args = parser.parse_args(argv)
        config = worker_config_from(args, model_name=args.model_name, served_model_name=args.model_name)
        engine = cls(args.model_name, args.max_tokens, args.delay, config.disaggregation_mode, config.route_to_encoder)
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            model=self.model_name,
            served_model_name=self.model_name,
            context_length=2048,
            kv_cache_block_size=BLOCK_TOKENS,
            total_kv_blocks=TOTAL_BLOCKS,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            # A decode worker leaves it to the prefill workers, which get the media.
            runtime_data={} if self.disaggregation_mode is DisaggregationMode.DECODE else {MEDIA_KINDS: list(MEDIA)},
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        token_ids = token_ids_to_list(request["token_ids"])  # they may arrive packed
        prompt_tokens = len(token_ids)
        if self.disaggregation_mode is DisaggregationMode.ENCODE:
            yield await self._encode(request, context, prompt_tokens)
            return
        media = self._accept(request)
        total = (request.get("stop_conditions") or {}).get("max_tokens") or self.max_tokens
        top_logprobs = (request.get("output_options") or {}).get("logprobs")

        with (
            telemetry.start_span(context, "sample.tokens", prompt_len=prompt_tokens),
            self._kv.blocks_of(token_ids),  # published now, removed when this generator is closed
        ):
            for done in range(total):
                if context.is_stopped():
                    yield final_chunk("cancelled", usage=usage(prompt_tokens, done))
                    return
                await asyncio.sleep(self.delay)
                token_id = (done + 1) % VOCABULARY
                is_last = done + 1 == total
                if is_last:
                    out = final_chunk("length", [token_id], usage=usage(prompt_tokens, total))
                    self._finish(out, token_id, media)
                else:
                    out = chunk([token_id])
                if top_logprobs is not None:
                    add_logprobs(out, token_id, top_logprobs)
                yield out

    async def cleanup(self) -> None:
        await self._kv.close()

    # -- optional: the health check -----------------------------------------------------------------------------------

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id=1)

    # -- optional: KV events and load, so that the router can place requests ------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        if self.disaggregation_mode is DisaggregationMode.ENCODE:
            return []
        return [PushSource(on_ready=self._kv.attach_events, dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [] if self.disaggregation_mode is DisaggregationMode.ENCODE else [0]

    def attach_snapshot_publisher(self, publisher: SnapshotPublisher) -> None:
        self._kv.attach_snapshots(publisher)

    # -- optional: disaggregated roles and media ----------------------------------------------------------------------

    def _accept(self, request: GenerateRequest) -> dict[str, Any] | None:
        """Check what the role demands of a request and prepare it. Returns the encoded media, or None for a request of text."""
        if self.disaggregation_mode is DisaggregationMode.DECODE:
            if extract_multimodal_kwargs(request) is not None:
                raise InvalidRequest("decode worker should not receive raw multimodal payloads; prefill consumes them")
            if not is_probe(request):
                require_prefill_result(request, self.disaggregation_mode)
            return None
        if self.disaggregation_mode is DisaggregationMode.PREFILL:
            enforce_prefill_max_tokens(request)
        return self._encoded_media(request)

    def _encoded_media(self, request: GenerateRequest) -> dict[str, Any] | None:
        """Return the encode worker's result, or our own where there is no encode worker; None for a request of text."""
        media = extract_multimodal_kwargs(request)
        if media is None and request.get("encoder_result") is None:
            return None
        if not self.route_to_encoder:
            return None if media is None else encode_media(media)
        result = require_encoder_result(request, self.disaggregation_mode)
        if not str(result.get("handle", "")).startswith(ENCODER_HANDLE):
            raise InvalidRequest(
                f"encoder_result.handle must start with {ENCODER_HANDLE!r}, got {result.get('handle')!r}"
            )
        return result

    async def _encode(self, request: GenerateRequest, context: Context, prompt_tokens: int) -> GenerateChunk:
        """Make the whole answer of an encode worker: one chunk with a handle for the worker that generates."""
        counts = usage(prompt_tokens, 0)
        if not context.is_stopped():
            await asyncio.sleep(self.delay)
        if context.is_stopped():
            return final_chunk("cancelled", usage=counts)
        return encoder_terminal_chunk(encode_media(extract_multimodal_kwargs(request) or {}), completion_usage=counts)

    def _finish(self, last: GenerateChunk, token_id: int, media: dict[str, Any] | None) -> None:
        """Put the hand-off to the next worker, and what became of the media, on the last chunk."""
        if self.disaggregation_mode is DisaggregationMode.PREFILL:
            last["disaggregated_params"] = {"sample_handle": uuid.uuid4().hex, "completed_tokens": [token_id]}
        if media is not None:
            last["engine_data"] = {"sample_multimodal": media}


def encode_media(media: dict[str, Any]) -> dict[str, Any]:
    """Stand in for an encoder: return a handle, and the media that an encoder would read."""
    return {"handle": ENCODER_HANDLE + uuid.uuid4().hex, "multimodal_kwargs": media}


def add_logprobs(out: GenerateChunk, token_id: int, count: int) -> None:
    """Add invented log probabilities: the chosen token's, and with `count` > 0 also those of `count` alternatives."""
    chosen = -0.1 * (token_id % 10)
    out["log_probs"] = [chosen]
    count = min(count, MAX_TOP_LOGPROBS)
    if count > 0:
        out["top_logprobs"] = [
            [
                {
                    "rank": distance + 1,
                    "token_id": (token_id + distance) % VOCABULARY,
                    "token": f"token_id:{(token_id + distance) % VOCABULARY}",
                    "logprob": chosen - 0.1 * distance,
                }
                for distance in range(count + 1)
            ]
        ]
