"""The checks, one per promise, in the order in which they are run."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from dynamo.contract.conformance.contexts import mock_context
from dynamo.contract.conformance.failures import ConformanceFailure
from dynamo.contract.engine import BaseEngine, LLMEngine
from dynamo.contract.metrics import EngineMetrics
from dynamo.protocol.finish import CANCELLED, EngineFailed, normalise
from dynamo.runtime.context import Context
from dynamo.runtime.metrics import MetricsRegistry
from dynamo.runtime.tasks import is_being_cancelled

__all__ = ["EngineFactory", "run_conformance", "run_encode_conformance", "run_raw_conformance"]

EngineFactory = Callable[[], Any]
"""Returns a fresh engine that is not started (or an awaitable of one). Called twice."""

Report = Callable[[str], None]
"""Told the name of each check that passed."""

CANCEL_SECONDS: Final = 2.0
REQUEST_SECONDS: Final = 60.0  # a plain request that takes longer than this on a test engine hangs
CONCURRENT: Final = 8
MAX_ITEMS: Final = 100_000  # of one stream
PROMPT: Final = [1, 2, 3]
WORKER_ID: Final = 0

TOKEN_FIELDS: Final = (
    "context_length",
    "kv_cache_block_size",
    "total_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "data_parallel_size",
    "data_parallel_start_rank",
    "bootstrap_host",
    "bootstrap_port",
)


async def run_conformance(factory: EngineFactory, *, report: Report | None = None) -> None:
    """Hold a token engine to the contract; no network, no `from_args`.

    Runs the checks in order on one engine, then `cleanup()` on a second one that never started.

    Raises:
        ConformanceFailure: the first broken promise. The engine is cleaned up all the same.
    """

    async def checks(engine: Any, passed: Report) -> None:
        model = await _check_start(engine, passed)
        await _check_kv_event_sources(engine, passed)
        await _check_metrics(engine, passed)
        request = token_request(model, max_tokens=8)
        _check_token_stream(await _collect(engine, request, mock_context()))
        passed("one request is served")
        await _check_concurrent(engine, request, _check_token_stream, passed)
        await _check_cancellation(engine, token_request(model, max_tokens=10_000), passed)

    await _run(factory, checks, report)


async def run_encode_conformance(factory: EngineFactory, *, report: Report | None = None) -> None:
    """As `run_conformance`, for an engine in the encode role."""

    async def checks(engine: Any, passed: Report) -> None:
        model = await _check_start(engine, passed)
        await _check_kv_event_sources(engine, passed)
        await _check_metrics(engine, passed)
        request = encode_request(model)
        _check_encode_stream(await _collect(engine, request, mock_context()))
        passed("one encode request is served")
        await _check_concurrent(engine, request, _check_encode_stream, passed)
        await _check_cancellation(engine, request, passed)

    await _run(factory, checks, report)


async def run_raw_conformance(factory: EngineFactory, *, report: Report | None = None) -> None:
    """As `run_conformance`, for a `RawEngine`: objects instead of chunks, the end instead of a terminal."""

    async def checks(engine: Any, passed: Report) -> None:
        config = await _check_start_config(engine, passed)
        advertised = [name for name in TOKEN_FIELDS if getattr(config, name, None) is not None]
        if advertised or getattr(config, "llm", None) is not None:
            raise ConformanceFailure("RawEngineAdvertisedLlmRegistration", ", ".join(advertised) or "llm is set")
        passed("the config is a raw engine's")
        await _check_metrics(engine, passed)
        request = {"prompt": "ping"}
        _check_raw_stream(await _collect(engine, request, mock_context()))
        passed("one request is served")
        await _check_concurrent(engine, request, _check_raw_stream, passed)
        await _end_of_cancelled(engine, {"prompt": "ping", "steps": 100_000})
        passed("a cancelled request ends")

    await _run(factory, checks, report)


def token_request(model: str, *, max_tokens: int) -> dict[str, Any]:
    """The kit's request, in the shape that arrives over the wire: unset members are None."""
    return {
        "token_ids": list(PROMPT),
        "model": model,
        "stop_conditions": {"max_tokens": max_tokens, "stop": None, "min_tokens": None, "ignore_eos": None},
        "sampling_options": {"temperature": None, "top_p": None, "n": None},
        "output_options": {"logprobs": None},
        "eos_token_ids": [],
        "annotations": [],
        "routing": {},
    }


def encode_request(model: str) -> dict[str, Any]:
    """The kit's request to an encode worker."""
    return {
        **token_request(model, max_tokens=8),
        "multi_modal_data": {"image": [{"Url": "data:image/png;base64,AA=="}]},
        "mm_processor_kwargs": {"min_pixels": 64},
    }


# -- the frame all three share ------------------------------------------------------------------------------------------


async def _run(factory: EngineFactory, checks: Callable[[Any, Report], Awaitable[None]], report: Report | None) -> None:
    passed = report or (lambda _name: None)
    engine = await _fresh(factory)
    cleaned = False
    try:
        await checks(engine, passed)
        cleaned = True  # from here on it is the cleanup itself that is judged
        await _attempt("CleanupFailed", engine.cleanup())
        passed("cleanup succeeds")
        await _attempt("SecondCleanupFailed", engine.cleanup())
        passed("cleanup twice is safe")
    finally:
        if not cleaned:
            await _quietly(engine)
    never_started = await _fresh(factory)
    await _attempt("CleanupWithoutStartFailed", never_started.cleanup())
    passed("cleanup without start is safe")


async def _fresh(factory: EngineFactory) -> Any:
    made = factory()
    engine = await made if inspect.isawaitable(made) else made
    if not isinstance(engine, BaseEngine):
        raise TypeError(f"the factory must return an LLMEngine or RawEngine, got {type(engine).__name__}")
    return engine


async def _quietly(engine: Any) -> None:
    """Release a failing engine without hiding why it failed: the first broken promise is the one reported."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            await engine.cleanup()
    except (Exception, asyncio.CancelledError) as error:
        del error  # a broken engine's cleanup may well be broken too; the report names the first failure


async def _attempt(name: str, call: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await call
    except ConformanceFailure:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise _named(error, name) from error


def _named(error: BaseException, name: str) -> BaseException:
    """A failure of the engine by its name. Its own CancelledError (it awaited a task it had cancelled) is one; that of
    whoever runs the kit is not, and comes back as it is."""
    return error if is_being_cancelled() else ConformanceFailure(name, _text(error))


# -- the checks ---------------------------------------------------------------------------------------------------------


async def _check_start_config(engine: Any, passed: Report) -> Any:
    config = await _attempt("StartFailed", engine.start(WORKER_ID))
    if not hasattr(config, "model"):
        raise ConformanceFailure("StartFailed", f"start() returned {type(config).__name__}, which has no model")
    passed("start succeeds")
    if not config.model:
        raise ConformanceFailure("EmptyModelInConfig")
    passed("the config names its model")
    return config


async def _check_start(engine: Any, passed: Report) -> str:
    return str((await _check_start_config(engine, passed)).model)


async def _check_kv_event_sources(engine: LLMEngine, passed: Report) -> None:
    async def ranks() -> list[int]:
        sources = await engine.kv_event_sources()
        if not isinstance(sources, list):
            raise TypeError(f"kv_event_sources() returned {type(sources).__name__}")
        strange = [type(s).__name__ for s in sources if type(s).__name__ not in ("ZmqSource", "PushSource")]
        if strange:
            raise TypeError(f"kv_event_sources() returned {', '.join(strange)}")
        return [source.dp_rank for source in sources]

    first = await _attempt("KvEventSourcesFailed", ranks())
    second = await _attempt("KvEventSourcesFailed", ranks())
    if first != second:
        raise ConformanceFailure("KvEventSourcesNotIdempotent", f"first {first}, then {second}")
    passed("KV event sources are stable")


async def _check_metrics(engine: Any, passed: Report) -> None:
    async def ranks() -> list[int]:
        # A throw-away: what is registered here is never scraped.
        metrics = EngineMetrics(
            MetricsRegistry(), namespace="conformance", component="backend", endpoint="generate", worker_id="0"
        )
        await engine.register_prometheus(metrics)
        found = engine.component_metrics_dp_ranks()
        if not isinstance(found, list) or not all(type(rank) is int for rank in found):
            raise TypeError(f"component_metrics_dp_ranks() must return a list of ints, got {found!r}")
        return found

    first = await _attempt("SetupMetricsFailed", ranks())
    second = await _attempt("SetupMetricsFailed", ranks())
    if first != second:
        raise ConformanceFailure("ComponentMetricsNotIdempotent", f"first {first}, then {second}")
    passed("metrics set-up is stable")


def _check_token_stream(chunks: Sequence[Any]) -> None:
    if not chunks:
        raise ConformanceFailure("NoChunksYielded")
    tokens = 0
    for position, chunk in enumerate(chunks):
        if not isinstance(chunk, Mapping) or not isinstance(chunk.get("token_ids"), list | tuple):
            raise ConformanceFailure("StreamYieldedError", f"chunk {position} is no chunk with token_ids: {chunk!r}")
        if "index" not in chunk:
            raise ConformanceFailure("StreamYieldedError", f"chunk {position} has no index")
        tokens += len(chunk["token_ids"])
        if chunk.get("finish_reason") is not None and position < len(chunks) - 1:
            raise ConformanceFailure("ChunkAfterTerminal", f"chunk {position} of {len(chunks)} was terminal")
    last = chunks[-1]
    if _reason(last) is None:
        raise ConformanceFailure("NoTerminalChunk")
    reported = (last.get("completion_usage") or {}).get("completion_tokens")
    if reported is not None and reported != tokens:
        raise ConformanceFailure("CompletionTokensMismatch", chunked=tokens, reported=reported)


def _check_encode_stream(chunks: Sequence[Any]) -> None:
    if not chunks:
        raise ConformanceFailure("NoChunksYielded")
    if len(chunks) != 1:
        raise ConformanceFailure("EncodeChunkCount", count=len(chunks))
    (chunk,) = chunks
    if not isinstance(chunk, Mapping):
        raise ConformanceFailure("StreamYieldedError", f"the chunk is {type(chunk).__name__}")
    if _reason(chunk) != "stop":
        raise ConformanceFailure("EncodeTerminalExpected", f"finish_reason is {chunk.get('finish_reason')!r}")
    if chunk.get("token_ids"):
        raise ConformanceFailure("EncodeTokensNotEmpty", count=len(chunk["token_ids"]))
    if not isinstance(chunk.get("encoder_result"), dict):
        raise ConformanceFailure("EncoderResultExpectedObject", f"got {type(chunk.get('encoder_result')).__name__}")
    usage = chunk.get("completion_usage")
    if usage is not None:
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens")
        if counts[1] != 0 or counts[0] != counts[2]:
            raise ConformanceFailure("EncodeUsageMismatch", f"prompt, completion, total = {counts}")


def _check_raw_stream(items: Sequence[Any]) -> None:
    if not items:
        raise ConformanceFailure("NoChunksYielded")


async def _check_concurrent(
    engine: Any, request: dict[str, Any], check: Callable[[Sequence[Any]], None], passed: Report
) -> None:
    streams = [_collect(engine, copy.deepcopy(request), mock_context()) for _ in range(CONCURRENT)]
    answers = await asyncio.gather(*streams, return_exceptions=True)
    for number, answer in enumerate(answers):
        try:
            if isinstance(answer, BaseException):
                raise answer
            check(answer)
        except (ConformanceFailure, Exception) as error:
            raise ConformanceFailure("ConcurrentGenerateFailed", f"request {number}: {_text(error)}") from error
    passed(f"{CONCURRENT} requests at a time are served")


async def _check_cancellation(engine: Any, request: dict[str, Any], passed: Report) -> None:
    chunks = await _end_of_cancelled(engine, request)
    passed("a cancelled request ends in time")
    if not chunks:
        raise ConformanceFailure("NoChunksYielded", "the cancelled request")
    last = chunks[-1]
    if not isinstance(last, Mapping) or _reason(last) != CANCELLED:
        found = last.get("finish_reason") if isinstance(last, Mapping) else last
        raise ConformanceFailure("CancellationIgnored", f"its last chunk says {found!r}")
    passed('its last chunk says "cancelled"')


async def _end_of_cancelled(engine: Any, request: dict[str, Any]) -> list[Any]:
    """Everything a request yields whose context was stopped before the first poll."""
    context = mock_context()
    context.stop_generating()
    begun = asyncio.get_running_loop().time()
    # Awaited below or, if the engine swallows even a task's cancellation, given up on: the kit itself must end.
    task = asyncio.create_task(_collect(engine, request, context), name="conformance: cancelled request")
    await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        after = asyncio.get_running_loop().time() - begun
        raise ConformanceFailure("CancellationNotObserved", after=f"{after:.1f}s")
    return task.result()


async def _collect(engine: Any, request: dict[str, Any], context: Context) -> list[Any]:
    """Every item of one request. Errors come out as the failures they are."""
    try:
        stream = engine.generate(request, context=context)
    except Exception as error:
        raise ConformanceFailure("GenerateFailed", _text(error)) from error
    if not hasattr(stream, "__aiter__") or not hasattr(stream, "aclose"):
        if inspect.iscoroutine(stream):
            stream.close()
        raise ConformanceFailure(
            "GenerateFailed", f"it returned {type(stream).__name__}; write `async def` with `yield`"
        )
    return await _drain(stream)


async def _drain(stream: AsyncGenerator[Any, None]) -> list[Any]:
    items: list[Any] = []
    try:
        async with asyncio.timeout(REQUEST_SECONDS), aclosing(stream):
            async for item in stream:
                items.append(item)
                if len(items) > MAX_ITEMS:
                    raise ConformanceFailure("StreamYieldedError", f"more than {MAX_ITEMS} chunks for 8 tokens")
                if isinstance(item, Mapping):
                    _reason(item)
    except ConformanceFailure:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise _named(error, "StreamYieldedError") from error
    return items


def _reason(chunk: Mapping[str, Any]) -> str | None:
    """The canonical finish reason. An error reason is a stream error; so is one of an impossible type."""
    reason = chunk.get("finish_reason")
    if reason is None:
        return None
    try:
        return normalise(reason)
    except (EngineFailed, TypeError) as error:
        raise ConformanceFailure("StreamYieldedError", _text(error)) from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, ConformanceFailure) else f"{type(error).__name__}: {error}"
