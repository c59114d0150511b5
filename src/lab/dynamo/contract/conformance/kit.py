"""The checks, one per promise, in the order in which they are run."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from dynamo.contract.conformance.contexts import mock_context
from dynamo.contract.conformance.failures import ConformanceFailure
from dynamo.contract.conformance.loop_watch import LoopWatch, watch_loop
from dynamo.contract.conformance.streams import CancelledCheck, EncodeCheck, RawCheck, StreamCheck, TokenCheck
from dynamo.contract.engine import BaseEngine
from dynamo.contract.health_check import HEALTH_CHECK_KEY
from dynamo.contract.metrics import EngineMetrics
from dynamo.runtime.base.process_guard import Started, descendants
from dynamo.runtime.base.tasks import Background, is_being_cancelled
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.metrics import MetricsRegistry

EngineFactory = Callable[[], Any]
"""Returns a fresh engine that is not started (or an awaitable of one). Called twice."""

Report = Callable[[str], None]
"""Receives the name of each check that passed."""

START_SECONDS: Final = 60.0  # a model of a test loads within this time
CHUNK_SECONDS: Final = 5.0  # without a chunk, a test engine hangs
CANCEL_SECONDS: Final = 2.0
HOOK_SECONDS: Final = 10.0  # any other call of the engine
ALIVE_SECONDS: Final = 0.1  # how long a living engine must not have reported its death
PROCESS_SECONDS: Final = 10.0  # for what cleanup() has ended to be gone
PROCESS_POLL_SECONDS: Final = 0.05
CONCURRENT: Final = 8
MAX_TOKENS: Final = 8  # of the kit's requests
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


@dataclass(frozen=True)
class _Trial:
    """One engine before the kit."""

    engine: Any
    passed: Report
    start_seconds: float


async def run_conformance(
    factory: EngineFactory, *, report: Report | None = None, start_seconds: float = START_SECONDS
) -> None:
    """Hold a token engine to the contract; no network, no `from_args`.

    Runs the checks in order on one engine, then `cleanup()` on a second one that never started. `start_seconds` is what
    `start()` may take.

    Raises:
        ConformanceFailure: the first broken promise. The engine is cleaned up all the same.
    """

    async def checks(trial: _Trial) -> None:
        model = await _check_start(trial)
        await _check_kv_event_sources(trial)
        await _check_metrics(trial)
        request = token_request(model, max_tokens=MAX_TOKENS)
        await _check_requests(trial, "request", request, lambda: TokenCheck(MAX_TOKENS))
        await _check_cancellation(trial, token_request(model, max_tokens=10_000))
        trial.passed('the last chunk of a cancelled request has the reason "cancelled"')

    await _run(factory, checks, report, start_seconds)


async def run_encode_conformance(
    factory: EngineFactory, *, report: Report | None = None, start_seconds: float = START_SECONDS
) -> None:
    """Hold an engine in the encode role to the contract; else as `run_conformance`."""

    async def checks(trial: _Trial) -> None:
        model = await _check_start(trial)
        await _check_kv_event_sources(trial)
        await _check_metrics(trial)
        await _check_requests(trial, "encode request", encode_request(model), EncodeCheck)
        await _check_cancellation(trial, encode_request(model))
        trial.passed('the last chunk of a cancelled request has the reason "cancelled"')

    await _run(factory, checks, report, start_seconds)


async def run_raw_conformance(
    factory: EngineFactory, *, report: Report | None = None, start_seconds: float = START_SECONDS
) -> None:
    """Hold a `RawEngine` to the contract: objects instead of chunks, the end of the stream instead of a terminal chunk.

    The request is the engine's own `health_check_payload()`, where it has one, with a `prompt` beside it.
    """

    async def checks(trial: _Trial) -> None:
        config = await _check_start_config(trial)
        advertised = [name for name in TOKEN_FIELDS if getattr(config, name, None) is not None]
        if advertised or getattr(config, "llm", None) is not None:
            raise ConformanceFailure("RawEngineAdvertisedLlmRegistration", ", ".join(advertised) or "llm is set")
        trial.passed("the config is a raw engine's")
        await _check_metrics(trial)
        request = await _raw_request(trial)
        await _check_requests(trial, "request", request, RawCheck)
        await _check_cancellation(trial, {**request, "steps": 100_000}, terminal=False)

    await _run(factory, checks, report, start_seconds)


async def _raw_request(trial: _Trial) -> dict[str, Any]:
    payload = await _attempt("StreamYieldedError", trial.engine.health_check_payload(), HOOK_SECONDS)
    plain = {name: value for name, value in (payload or {}).items() if name != HEALTH_CHECK_KEY}
    return {"prompt": "ping", **plain}


def token_request(model: str, *, max_tokens: int) -> dict[str, Any]:
    """Make the kit's request in the shape that arrives over the wire: unset members are None."""
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
    """Make the kit's request to an encode worker."""
    return {
        **token_request(model, max_tokens=8),
        "multi_modal_data": {"image": [{"Url": "data:image/png;base64,AA=="}]},
        "mm_processor_kwargs": {"min_pixels": 64},
    }


# -- the frame all three share ------------------------------------------------------------------------------------------


async def _run(
    factory: EngineFactory, checks: Callable[[_Trial], Awaitable[None]], report: Report | None, start_seconds: float
) -> None:
    passed = report or (lambda _name: None)
    engine = await _fresh(factory)
    before = await asyncio.to_thread(descendants, os.getpid()) if engine.has_child_processes else {}
    cleaned = False
    try:
        trial = _Trial(engine, passed, start_seconds)
        await checks(trial)
        await _check_failure_reports(trial)
        cleaned = True  # from here on it is the cleanup itself that is judged
        await _attempt("CleanupFailed", engine.cleanup(), HOOK_SECONDS)
        passed("cleanup succeeds")
        await _attempt("SecondCleanupFailed", engine.cleanup(), HOOK_SECONDS)
        passed("cleanup twice is safe")
        if engine.has_child_processes:
            await _check_processes(before)
            passed("cleanup leaves no child process behind")
    finally:
        if not cleaned:
            await _quietly(engine)
    never_started = await _fresh(factory)
    await _attempt("CleanupWithoutStartFailed", never_started.cleanup(), HOOK_SECONDS)
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
        async with asyncio.timeout(HOOK_SECONDS):
            await engine.cleanup()
    except (Exception, asyncio.CancelledError) as error:
        del error  # a broken engine's cleanup may well be broken too; the report names the first failure


async def _attempt(name: str, call: Awaitable[Any], seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except ConformanceFailure:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if limit.expired() and not is_being_cancelled():
            raise ConformanceFailure(name, f"it did not return within {seconds:g} s") from error
        raise _named(error, name) from error


def _named(error: BaseException, name: str) -> BaseException:
    """Give a failure of the engine its name.

    The engine's own CancelledError (it awaited a task it had cancelled) is a failure. The cancellation of the task that
    runs the kit is not, and comes back as it is.
    """
    return error if is_being_cancelled() else ConformanceFailure(name, f"{type(error).__name__}: {error}")


# -- the checks ---------------------------------------------------------------------------------------------------------


async def _check_start_config(trial: _Trial) -> Any:
    config = await _attempt("StartFailed", trial.engine.start(WORKER_ID), trial.start_seconds)
    if not hasattr(config, "model"):
        raise ConformanceFailure("StartFailed", f"start() returned {type(config).__name__}, which has no model")
    trial.passed("start succeeds")
    if not config.model:
        raise ConformanceFailure("EmptyModelInConfig")
    trial.passed("the config names its model")
    return config


async def _check_start(trial: _Trial) -> str:
    return str((await _check_start_config(trial)).model)


async def _check_kv_event_sources(trial: _Trial) -> None:
    async def ranks() -> list[int]:
        sources = await trial.engine.kv_event_sources()
        if not isinstance(sources, list):
            raise TypeError(f"kv_event_sources() returned {type(sources).__name__}")
        strange = [type(s).__name__ for s in sources if type(s).__name__ not in ("ZmqSource", "PushSource")]
        if strange:
            raise TypeError(f"kv_event_sources() returned {', '.join(strange)}")
        return [source.dp_rank for source in sources]

    first = await _attempt("KvEventSourcesFailed", ranks(), HOOK_SECONDS)
    second = await _attempt("KvEventSourcesFailed", ranks(), HOOK_SECONDS)
    if first != second:
        raise ConformanceFailure("KvEventSourcesNotIdempotent", f"first {first}, then {second}")
    trial.passed("KV event sources are stable")


async def _check_metrics(trial: _Trial) -> None:
    async def ranks() -> list[int]:
        # A throw-away: what is registered here is never scraped.
        metrics = EngineMetrics(
            MetricsRegistry(), namespace="conformance", component="backend", endpoint="generate", worker_id="0"
        )
        await trial.engine.register_prometheus(metrics)
        found = trial.engine.component_metrics_dp_ranks()
        if not isinstance(found, list) or not all(type(rank) is int for rank in found):
            raise TypeError(f"component_metrics_dp_ranks() must return a list of ints, got {found!r}")
        return found

    first = await _attempt("SetupMetricsFailed", ranks(), HOOK_SECONDS)
    second = await _attempt("SetupMetricsFailed", ranks(), HOOK_SECONDS)
    if first != second:
        raise ConformanceFailure("ComponentMetricsNotIdempotent", f"first {first}, then {second}")
    trial.passed("metrics set-up is stable")


async def _check_requests(
    trial: _Trial, what: str, request: dict[str, Any], make_check: Callable[[], StreamCheck]
) -> None:
    async with watch_loop() as watch:
        await _judge(trial.engine, copy.deepcopy(request), make_check(), watch)
        trial.passed(f"one {what} is served")
        streams = [_judge(trial.engine, copy.deepcopy(request), make_check(), watch) for _ in range(CONCURRENT)]
        answers = await asyncio.gather(*streams, return_exceptions=True)
        watch.check()
        for number, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                raise ConformanceFailure("ConcurrentGenerateFailed", f"request {number}: {answer}") from answer
        trial.passed(f"{CONCURRENT} requests at a time are served")


async def _check_cancellation(trial: _Trial, request: dict[str, Any], *, terminal: bool = True) -> None:
    context = mock_context()
    context.stop_generating()
    check = CancelledCheck(terminal=terminal)
    begun = asyncio.get_running_loop().time()
    async with watch_loop() as watch:
        # Given up on if the engine swallows even a task's cancellation: the kit itself must end.
        work = Background()
        task = work.start(_drain(trial.engine, request, context, check.take), "conformance: cancelled", is_awaited=True)
        task.add_done_callback(_note_failure)
        await work.wait(CANCEL_SECONDS)
        watch.check()
        if not task.done():
            await work.close(CANCEL_SECONDS)
            after = asyncio.get_running_loop().time() - begun
            raise ConformanceFailure("CancellationNotObserved", after=f"{after:.1f}s")
        task.result()
    trial.passed("a cancelled request ends in time")
    check.finish()


async def _check_failure_reports(trial: _Trial) -> None:
    try:
        mapped = trial.engine.map_error(LookupError("an error of the conformance kit"))
    except Exception as error:
        raise _named(error, "MapErrorFailed") from error
    if not (mapped is None or isinstance(mapped, Exception)):
        raise ConformanceFailure("MapErrorFailed", f"it returned {type(mapped).__name__}")
    work = Background()
    task = work.start(trial.engine.wait_dead(), "conformance: wait_dead", is_awaited=True)
    await work.wait(ALIVE_SECONDS)
    if task.done():
        outcome = task.exception() or task.result()
        raise ConformanceFailure("DeathReportedWhileAlive", str(outcome)) from task.exception()
    await work.close(CANCEL_SECONDS)
    trial.passed("the engine does not report its death while it serves")


async def _check_processes(before: Started) -> None:
    """Wait until no process is left that was started since `before`. Processes may take a moment to be gone."""
    clock = asyncio.get_running_loop().time
    until = clock() + PROCESS_SECONDS
    while left := set(await asyncio.to_thread(descendants, os.getpid())) - set(before):
        if clock() >= until:
            raise ConformanceFailure("ProcessesLeft", ", ".join(map(str, sorted(left))))
        await asyncio.sleep(PROCESS_POLL_SECONDS)


async def _judge(engine: Any, request: dict[str, Any], check: StreamCheck, watch: LoopWatch) -> None:
    """Serve one request and hold its stream to `check`. Gives up on a stream that is silent for too long."""
    loop = asyncio.get_running_loop()
    last_item_at = loop.time()

    def take(item: Any) -> None:
        nonlocal last_item_at
        last_item_at = loop.time()
        check.take(item)

    # Given up on if need be, as an engine may swallow a task's cancellation.
    work = Background()
    task = work.start(_drain(engine, request, mock_context(), take), "conformance: request", is_awaited=True)
    task.add_done_callback(_note_failure)
    try:
        while not task.done():
            left = last_item_at + CHUNK_SECONDS - loop.time()
            if left <= 0:
                raise ConformanceFailure("ChunkTimedOut", after=f"{CHUNK_SECONDS:.1f}s")
            await work.wait(left)
    finally:
        await work.close(CANCEL_SECONDS)
        watch.check()
    task.result()
    check.finish()


def _note_failure(task: asyncio.Task[None]) -> None:
    """Mark the failure of a request as seen: of one that blocked the loop, the watch reports why it ended."""
    if not task.cancelled():
        task.exception()


async def _drain(engine: Any, request: dict[str, Any], context: Context, take: Callable[[Any], None]) -> None:
    """Give every item of one request to `take`. Errors of the engine come out as the failures they are."""
    try:
        stream = engine.generate(request, context=context)
    except Exception as error:
        raise ConformanceFailure("GenerateFailed", f"{type(error).__name__}: {error}") from error
    if not hasattr(stream, "__aiter__") or not hasattr(stream, "aclose"):
        if inspect.iscoroutine(stream):
            stream.close()
        raise ConformanceFailure(
            "GenerateFailed", f"it returned {type(stream).__name__}; write `async def` with `yield`"
        )
    await _take_all(stream, take)


async def _take_all(stream: AsyncGenerator[Any, None], take: Callable[[Any], None]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                take(item)
    except ConformanceFailure:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise _named(error, "StreamYieldedError") from error
