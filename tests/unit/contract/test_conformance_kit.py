"""For every failure name a deliberately broken engine produces exactly it, and honest engines pass."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, ClassVar

import pytest

from dynamo.contract.conformance import (
    FAILURE_NAMES,
    ConformanceFailure,
    cancelling_context,
    mock_context,
    run_conformance,
    run_encode_conformance,
    run_raw_conformance,
)
from dynamo.contract.conformance.loop_watch import LoopWatch
from dynamo.contract.engine import EngineConfig, LLMEngine, RawEngine
from dynamo.runtime.calls.context import Context
from dynamo.worker.kv_publishing.publisher import PushSource
from support.cases import each_case


class Honest(LLMEngine):
    """Keeps every promise; the broken ones below break one each."""

    starts = cleanups = ranks_asked = sources_asked = requests = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise AssertionError("the kit must not call from_args")

    async def start(self, worker_id: int) -> EngineConfig:
        self.starts += 1
        return EngineConfig(model="m")

    async def cleanup(self) -> None:
        self.cleanups += 1

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self.requests += 1
        made, total = 0, request["stop_conditions"].get("max_tokens") or 4
        while made < total:
            await asyncio.sleep(0)
            if context.is_stopped():
                yield self.last([], "cancelled", made)
                return
            made += 1
            yield {"token_ids": [made], "index": 0} if made < total else self.last([made], "length", made)

    def last(self, ids: list[int], reason: str, made: int) -> dict[str, Any]:
        usage = {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made}
        return {"token_ids": ids, "index": 0, "finish_reason": reason, "completion_usage": usage}


class StartFailed(Honest):
    async def start(self, worker_id: int) -> EngineConfig:
        raise RuntimeError("no GPU")


class EmptyModelInConfig(Honest):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="")


class KvEventSourcesFailed(Honest):
    async def kv_event_sources(self) -> Any:
        return "tcp://somewhere"


class KvEventSourcesNotIdempotent(Honest):
    async def kv_event_sources(self) -> Any:
        self.sources_asked += 1
        return [PushSource(on_ready=lambda publisher: None, dp_rank=self.sources_asked)]


class SetupMetricsFailed(Honest):
    async def register_prometheus(self, metrics: Any) -> None:
        raise RuntimeError("already registered")


class ComponentMetricsNotIdempotent(Honest):
    def component_metrics_dp_ranks(self) -> list[int]:
        self.ranks_asked += 1
        return [self.ranks_asked]


class GenerateFailed(Honest):
    def generate(self, request: Any, context: Context) -> Any:
        async def coroutine() -> None: ...

        return coroutine()


class NoChunksYielded(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        return
        yield


class StreamYieldedError(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "index": 0}
        raise RuntimeError("boom")


class NoTerminalChunk(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "index": 0}


class ChunkAfterTerminal(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "index": 0, "finish_reason": "stop"}
        yield {"token_ids": [2], "index": 0, "finish_reason": "stop"}


class CompletionTokensMismatch(Honest):
    def last(self, ids: list[int], reason: str, made: int) -> dict[str, Any]:
        return super().last(ids, reason, made + 1)


class Answers(Honest):
    """Answers with the chunk of its class."""

    chunk: ClassVar[Any] = {}

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0)
        reason = "cancelled" if context.is_stopped() else "stop"
        yield {"token_ids": [1], "index": 0, "finish_reason": reason} | self.chunk


class TokenIdsInvalid(Answers):
    chunk: ClassVar[Any] = {"token_ids": [1, -1]}


class IndexInvalid(Answers):
    chunk: ClassVar[Any] = {"index": 1}


class UnknownFinishReason(Answers):
    chunk: ClassVar[Any] = {"finish_reason": "done"}


class MaxTokensIgnored(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        while not context.is_stopped():  # for ever, as far as its client is concerned
            await asyncio.sleep(0)
            yield {"token_ids": [1], "index": 0}


class EventLoopBlocked(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        time.sleep(3600)  # noqa: ASYNC251
        yield self.last([1], "stop", 1)


class ChunkTimedOut(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        await asyncio.Event().wait()
        yield self.last([1], "stop", 1)


class ConcurrentGenerateFailed(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        self.requests += 1
        try:
            if self.requests > 1:
                raise RuntimeError("one at a time, please")
            await asyncio.sleep(0)
            yield self.last([1], "stop", 1)
        finally:
            self.requests -= 1


class CancellationNotObserved(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if request["stop_conditions"]["max_tokens"] > 8:
            await asyncio.Event().wait()
        yield self.last([1], "stop", 1)


class CancellationIgnored(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield self.last([1], "stop", 1)


class CleanupFailed(Honest):
    async def cleanup(self) -> None:
        raise RuntimeError("leak")


class SecondCleanupFailed(Honest):
    async def cleanup(self) -> None:
        await super().cleanup()
        if self.cleanups > 1:
            raise RuntimeError("already gone")


class CleanupWithoutStartFailed(Honest):
    async def cleanup(self) -> None:
        if not self.starts:
            raise AttributeError("no thread to join")


class MapErrorFailed(Honest):
    def map_error(self, error: Exception) -> Exception | None:
        return "oh"  # type: ignore[return-value]


class DeathReportedWhileAlive(Honest):
    async def wait_dead(self) -> str:
        return "it looked dead"


class ProcessesLeft(Honest):
    has_child_processes = True
    child: subprocess.Popen[bytes] | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        type(self).child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        return await super().start(worker_id)


TOKEN_BREAKERS: list[type[Honest]] = [
    StartFailed, EmptyModelInConfig, KvEventSourcesFailed, KvEventSourcesNotIdempotent, SetupMetricsFailed,
    ComponentMetricsNotIdempotent, GenerateFailed, NoChunksYielded, StreamYieldedError, NoTerminalChunk,
    ChunkAfterTerminal, CompletionTokensMismatch, TokenIdsInvalid, IndexInvalid, UnknownFinishReason,
    MaxTokensIgnored, EventLoopBlocked, ChunkTimedOut, ConcurrentGenerateFailed, CancellationNotObserved,
    CancellationIgnored, CleanupFailed, SecondCleanupFailed, CleanupWithoutStartFailed,
    MapErrorFailed, DeathReportedWhileAlive, ProcessesLeft,
]  # fmt: skip


@pytest.fixture
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.contract.conformance.kit.CANCEL_SECONDS", 0.05)
    monkeypatch.setattr("dynamo.contract.conformance.kit.CHUNK_SECONDS", 1.0)
    monkeypatch.setattr("dynamo.contract.conformance.kit.PROCESS_SECONDS", 0.2)


@pytest.mark.usefixtures("_short_limits")
@each_case("broken", TOKEN_BREAKERS, ids=lambda cls: cls.__name__)
async def test_each_broken_engine_is_named_exactly(broken: type[Honest]) -> None:
    try:
        with pytest.raises(ConformanceFailure) as caught:
            await run_conformance(broken)
    finally:
        if ProcessesLeft.child is not None:
            ProcessesLeft.child.kill()
            ProcessesLeft.child.wait()
    assert caught.value.name == broken.__name__
    assert str(caught.value).startswith(broken.__name__)


def answering(**changes: Any) -> type[Answers]:
    return type("Answering", (Answers,), {"chunk": changes})


@each_case(
    ("broken", "name"),
    [
        (answering(token_ids=["1"]), "TokenIdsInvalid"),
        (answering(token_ids=[1.0]), "TokenIdsInvalid"),
        (answering(token_ids=[True]), "TokenIdsInvalid"),
        (answering(token_ids=[2**32]), "TokenIdsInvalid"),
        (answering(token_ids=b"\x01\x00\x00\x00"), "StreamYieldedError"),
        (answering(index="0"), "IndexInvalid"),
        (answering(index=False), "IndexInvalid"),
        (answering(index=-1), "IndexInvalid"),
        (answering(finish_reason=""), "UnknownFinishReason"),
        (answering(finish_reason="eos_token"), "UnknownFinishReason"),
        (answering(finish_reason={"error": "x"}), "StreamYieldedError"),
        (answering(finish_reason=1), "StreamYieldedError"),
        (answering(token_ids=[1] * 9), "MaxTokensIgnored"),
        (answering(completion_usage=3), "StreamYieldedError"),
    ],
)
async def test_a_chunk_that_no_server_can_use_is_named(broken: type[Honest], name: str) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(broken)
    assert caught.value.name == name


@each_case("word", ["STOP", " eos ", "length", "tool_calls", "content_filter"])
async def test_the_words_a_server_knows_pass(word: str) -> None:
    class Fine(Honest):
        def last(self, ids: list[int], reason: str, made: int) -> dict[str, Any]:
            return super().last(ids, word if reason == "length" else reason, made)

    await run_conformance(Fine)


class BlocksEveryStep(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for token in range(8):
            time.sleep(0.15)  # noqa: ASYNC251 - never long at once, and the loop does not turn in between
            yield {"token_ids": [token], "index": 0} if token < 7 else self.last([token], "length", 8)


class BlocksInsideATask(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        await asyncio.create_task(self.compute())
        yield self.last([1], "stop", 1)

    async def compute(self) -> None:
        try:
            threading.Event().wait()  # the standard library's line is not the one to name
        except Exception:
            raise AssertionError("an engine cannot catch its interruption by accident") from None


class BlocksWhenCancelled(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if context.is_stopped():
            while True:
                pass
        async for chunk in super().generate(request, context):
            yield chunk


@each_case("broken", [EventLoopBlocked, BlocksEveryStep, BlocksInsideATask, BlocksWhenCancelled])
async def test_an_engine_that_blocks_the_loop_is_interrupted_and_its_line_is_named(
    broken: type[Honest], caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(broken)
    assert caught.value.name == "EventLoopBlocked"
    assert f"{__file__}:" in str(caught.value)
    assert signal.getsignal(signal.SIGUSR2) is before
    assert not [thread for thread in threading.enumerate() if "loop watch" in thread.name]
    del caught
    await asyncio.sleep(0)
    gc.collect()
    assert not caplog.records  # such as a task whose exception was never retrieved


def test_a_blocked_loop_of_another_thread_is_interrupted_too() -> None:
    failures: list[BaseException] = []

    def judge() -> None:
        try:
            asyncio.run(run_conformance(BlocksWhenCancelled))
        except ConformanceFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert [getattr(failure, "name", None) for failure in failures] == ["EventLoopBlocked"]


class EndsLate(threading.Event):
    """The end of a watch whose thread interrupts the loop at that very moment, before it or after it."""

    def __init__(self, watch: LoopWatch, moment: str) -> None:
        super().__init__()
        self._watch = watch
        self._moment: str | None = moment

    def set(self) -> None:
        moment, self._moment = self._moment, None
        if moment == "before":
            self._watch._interrupt()
        super().set()
        if moment == "after":
            self._watch._interrupt()


@each_case("moment,in_main_thread", list(itertools.product(["before", "after"], [True, False])))
def test_an_interruption_that_comes_too_late_is_dropped(moment: str, in_main_thread: bool) -> None:
    left: list[BaseException | None] = []

    async def main() -> None:
        watch = LoopWatch(asyncio.get_running_loop())
        watch._ended = EndsLate(watch, moment)
        with watch.watching():
            watch._stuck_at_tick = watch._ticks

    def judge() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            left.append(error)
        left.append(None)

    if in_main_thread:
        judge()
    else:
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    assert left == [None]


async def test_a_slow_start_may_block_the_loop() -> None:
    class Loads(Honest):
        async def start(self, worker_id: int) -> EngineConfig:
            time.sleep(0.8)  # noqa: ASYNC251
            return await super().start(worker_id)

    await run_conformance(Loads)


@pytest.mark.usefixtures("_short_limits")
async def test_an_engine_that_swallows_its_cancellation_does_not_keep_the_kit() -> None:
    released = asyncio.Event()

    class Swallows(Honest):
        async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()
            yield self.last([1], "stop", 1)

    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(Swallows)
    released.set()
    assert caught.value.name == "ChunkTimedOut"


class CancelsItself:
    """`task.cancel(); await task`, as it is often written."""

    @staticmethod
    async def stop_own_task() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task


class CleanupCancelsItself(Honest):
    async def cleanup(self) -> None:
        await CancelsItself.stop_own_task()


class StreamCancelsItself(Honest):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "index": 0}
        await CancelsItself.stop_own_task()


@pytest.mark.parametrize(
    ("broken", "name"), [(CleanupCancelsItself, "CleanupFailed"), (StreamCancelsItself, "StreamYieldedError")]
)
async def test_a_cancellation_of_the_engines_own_is_named_like_any_failure(broken: type[Honest], name: str) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(broken)
    assert caught.value.name == name


async def test_a_kit_that_is_cancelled_ends_as_cancelled_and_releases_the_engine() -> None:
    begun, engines = asyncio.Event(), list[Honest]()

    class Stuck(Honest):
        async def start(self, worker_id: int) -> EngineConfig:
            engines.append(self)
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

    task = asyncio.create_task(run_conformance(Stuck))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engines[0].cleanups == 1


async def test_an_honest_engine_passes_and_every_check_is_reported() -> None:
    passed: list[str] = []
    await run_conformance(Honest, report=passed.append)
    assert len(passed) == len(set(passed)) == 12


async def test_the_factory_is_called_twice_and_may_be_a_coroutine() -> None:
    made: list[Honest] = []

    async def factory() -> Honest:
        made.append(Honest())
        return made[-1]

    await run_conformance(factory)
    assert [(engine.starts, engine.cleanups) for engine in made] == [(1, 2), (0, 1)]


async def test_a_failing_engine_is_cleaned_up_all_the_same() -> None:
    engines: list[NoTerminalChunk] = []

    def factory() -> NoTerminalChunk:
        engines.append(NoTerminalChunk())
        return engines[-1]

    with pytest.raises(ConformanceFailure):
        await run_conformance(factory)
    assert engines[0].cleanups == 1


async def test_the_figures_of_a_mismatch_are_in_the_failure() -> None:
    with pytest.raises(ConformanceFailure, match=r"CompletionTokensMismatch\{chunked: 8, reported: 9\}") as caught:
        await run_conformance(CompletionTokensMismatch)
    assert caught.value.data == {"chunked": 8, "reported": 9}


# -- encode -------------------------------------------------------------------------------------------------------------


class HonestEncoder(Honest):
    answer: ClassVar[Any] = {"token_ids": [], "index": 0, "finish_reason": "stop", "encoder_result": {"handle": "h"}}

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0)
        if context.is_stopped():
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
            return
        yield self.answer


def encoder(**changes: Any) -> type[HonestEncoder]:
    return type("Encoder", (HonestEncoder,), {"answer": {**HonestEncoder.answer, **changes}})


class TwoChunks(HonestEncoder):
    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [], "index": 0}
        yield self.answer


BAD_USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
ENCODE_BREAKERS: list[tuple[str, Callable[[], Any]]] = [
    ("EncodeChunkCount", TwoChunks),
    ("EncodeTerminalExpected", encoder(finish_reason="length")),
    ("EncodeTokensNotEmpty", encoder(token_ids=[1])),
    ("EncoderResultExpectedObject", encoder(encoder_result=[1])),
    ("EncodeUsageMismatch", encoder(completion_usage=BAD_USAGE)),
]


@each_case(("name", "broken"), ENCODE_BREAKERS, ids=lambda v: v if isinstance(v, str) else "")
async def test_each_broken_encoder_is_named_exactly(name: str, broken: Callable[[], Any]) -> None:
    with pytest.raises(ConformanceFailure) as caught:
        await run_encode_conformance(broken)
    assert caught.value.name == name


async def test_an_honest_encoder_passes() -> None:
    await run_encode_conformance(HonestEncoder)


# -- raw ----------------------------------------------------------------------------------------------------------------


class HonestRaw(RawEngine):
    config: ClassVar[Any] = EngineConfig(model="raw")

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise AssertionError("the kit must not call from_args")

    async def start(self, worker_id: int) -> EngineConfig:
        return self.config

    async def cleanup(self) -> None:
        pass

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for step in range(request.get("steps", 1)):
            await asyncio.sleep(0)
            if context.is_stopped():
                return
            yield {"step": step}


async def test_an_honest_raw_engine_passes() -> None:
    await run_raw_conformance(HonestRaw)


async def test_a_raw_engine_with_token_fields_is_named() -> None:
    class Advertises(HonestRaw):
        config = EngineConfig(model="raw", kv_cache_block_size=16)

    with pytest.raises(ConformanceFailure) as caught:
        await run_raw_conformance(Advertises)
    assert caught.value.name == "RawEngineAdvertisedLlmRegistration"


def test_every_failure_name_has_its_broken_engine() -> None:
    tried = {cls.__name__ for cls in TOKEN_BREAKERS} | {name for name, _ in ENCODE_BREAKERS}
    assert tried | {"RawEngineAdvertisedLlmRegistration"} == set(FAILURE_NAMES)


# -- contexts -----------------------------------------------------------------------------------------------------------


def test_a_mock_context_is_live_and_fresh() -> None:
    assert not mock_context().is_stopped()
    assert mock_context().id() != mock_context().id()


async def test_a_cancelling_context_stops_itself() -> None:
    context = cancelling_context(0.001)
    assert not context.is_stopped()
    assert await context.async_killed_or_stopped()
    assert not context.is_killed()
