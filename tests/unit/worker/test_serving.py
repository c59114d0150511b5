"""Serving one request: the stream's rules, cancellation, errors, and that `finally` runs at once on every path."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from dynamo.contract.engine import EngineConfig, LLMEngine, RawEngine
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
    http_assertion,
    rule_of,
)
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.runtime.calls.context import Context
from dynamo.worker.serving import CHUNKS_PER_TURN, RawServing, TokenServing, wrap_error
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


class ListSink:
    """A sink that keeps what it is sent; `credit` None means unlimited."""

    request_bytes = response_bytes = 0

    def __init__(self, credit: int | None = None) -> None:
        self.sent: list[tuple[list[int], int, Any, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.ended = False
        self.credit = credit
        self.waiting = asyncio.Event()
        self.room = asyncio.Event()

    def send_tokens(self, token_ids: list[int], index: int = 0, finish_reason: Any = None, extra: Any = None) -> None:
        if not self.ended:
            self.sent.append((token_ids, index, finish_reason, extra))
            if self.credit is not None:
                self.credit -= 1

    def send_token(self, token_id: int) -> bool:
        self.send_tokens([token_id])
        return not self.ended and self.has_credit()

    def send_object(self, envelope: dict[str, Any]) -> None:
        if not self.ended:
            self.objects.append(envelope)

    def has_credit(self) -> bool:
        return self.credit is None or self.credit > 0

    async def wait_credit(self) -> None:
        self.waiting.set()
        await self.room.wait()

    def end(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error


Script = Callable[[dict[str, Any], Context], AsyncGenerator[Any, None]]


class Scripted(LLMEngine):
    """An engine that does what its script does and counts what is done to it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.aborts: list[Context] = []
        self.closed = asyncio.Event()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def cleanup(self) -> None:
        pass

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            async for item in self.script(request, context):
                yield item
        finally:
            self.closed.set()

    async def abort(self, context: Context) -> None:
        self.aborts.append(context)


REQUEST = {"token_ids": [1, 2, 3]}


async def serve(
    script: Script, *, context: Context | None = None, request: Any = None, **options: Any
) -> tuple[ListSink, Scripted]:
    engine, sink = Scripted(script), ListSink()
    await TokenServing(engine, **options).handle(request or dict(REQUEST), context or Context(), sink)
    return sink, engine


def script_of(*items: Any) -> Script:
    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for item in items:
            if isinstance(item, BaseException):
                raise item
            yield item

    return script


async def test_chunks_reach_the_sink_in_order_and_the_terminal_ends_the_stream() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    sink, engine = await serve(
        script_of(
            {"token_ids": [7], "index": 0},
            {"token_ids": [8], "index": 0, "finish_reason": "length", "completion_usage": usage, "mine": 1},
        )
    )
    assert sink.sent == [([7], 0, None, None), ([8], 0, "length", {"completion_usage": usage})]
    assert sink.ended
    assert sink.error is None
    assert engine.closed.is_set()
    assert engine.aborts == []


async def test_a_chunk_without_index_is_choice_0() -> None:
    sink, _ = await serve(script_of({"token_ids": [7]}, {"token_ids": [], "finish_reason": "stop"}))
    assert [entry[1] for entry in sink.sent] == [0, 0]


async def test_nothing_after_the_terminal_is_seen_and_the_generator_is_closed_at_once() -> None:
    sink, engine = await serve(script_of({"token_ids": [1], "finish_reason": "stop"}, {"token_ids": [2]}))
    assert [entry[0] for entry in sink.sent] == [[1]]
    assert sink.error is None
    assert engine.closed.is_set()


@each_case("reason", ["stop", "length", "cancelled", {"error": "x"}])
async def test_the_code_behind_the_last_yield_runs_once_the_answer_is_whole(reason: Any) -> None:
    sink = ListSink()
    ended_before: list[bool] = []

    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "finish_reason": reason}
        ended_before.append(sink.ended)

    await TokenServing(Scripted(script)).handle(dict(REQUEST), Context(), sink)
    assert ended_before == [True]


async def test_each_choice_may_have_code_behind_its_terminal_and_behind_the_last_it_runs_too() -> None:
    ran: list[int] = []

    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for index in range(2):
            yield {"token_ids": [1], "index": index, "finish_reason": "stop"}
            ran.append(index)

    await serve(script, request={**REQUEST, "sampling_options": {"n": 2}})
    assert ran == [0, 1]


async def test_an_engine_that_fails_behind_its_last_yield_is_logged_and_its_answer_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, engine = await serve(
        script_of({"token_ids": [1], "finish_reason": "stop"}, RuntimeError("late")), context=Context("the-id")
    )
    assert sink.error is None
    assert engine.closed.is_set()
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (record.getMessage(), record.__dict__["request_id"]) == (
        "request the-id: the engine failed after its last chunk",
        "the-id",
    )
    assert record.exc_info is not None


async def test_code_behind_the_last_yield_that_does_not_end_is_closed_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.worker.cancellation.CLOSE_SECONDS", 0.01)

    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "finish_reason": "stop"}
        await asyncio.Event().wait()

    sink, engine = await serve(script)
    assert sink.error is None
    assert engine.closed.is_set()
    assert "did not close in 0.01 s" in caplog.text


@pytest.mark.parametrize("after", [{"token_ids": [2]}, RuntimeError("late")])
async def test_the_validator_fails_a_stream_that_goes_on_after_its_terminal(after: Any) -> None:
    sink, _ = await serve(script_of({"token_ids": [1], "finish_reason": "stop"}, after), validate=True)
    assert "item yielded after terminal item" in str(sink.error)


async def test_the_validator_passes_a_clean_stream() -> None:
    sink, _ = await serve(script_of({"token_ids": [1], "finish_reason": "stop"}), validate=True)
    assert sink.error is None
    assert sink.sent[-1][2] == "stop"


@each_case(
    ("chunk", "ok"),
    [
        ({"token_ids": [], "finish_reason": "stop"}, False),
        ({"token_ids": [], "finish_reason": "stop", "encoder_result": [1]}, False),
        ({"token_ids": [], "finish_reason": "stop", "encoder_result": {"h": 1}}, True),
        ({"token_ids": [], "finish_reason": {"error": "x"}}, True),
    ],
)
async def test_the_validator_holds_the_encode_contract(chunk: dict[str, Any], ok: bool) -> None:
    sink, _ = await serve(script_of(chunk), validate=True, mode=DisaggregationMode.ENCODE)
    assert ("Encode-mode contract violation" in str(sink.error)) is not ok


async def test_a_stream_without_a_terminal_is_incomplete() -> None:
    sink, _ = await serve(script_of({"token_ids": [1]}))
    assert isinstance(sink.error, StreamIncomplete)
    assert [entry[0] for entry in sink.sent] == [[1]]


async def test_an_empty_stream_is_incomplete() -> None:
    sink, _ = await serve(script_of())
    assert isinstance(sink.error, StreamIncomplete)


BAD_CHUNKS = [
    None, 5, "text", [1], {}, {"index": 0}, {"token_ids": None}, {"token_ids": "12"}, {"token_ids": [-1]},
    {"token_ids": [2**32]}, {"token_ids": [1.5]}, {"token_ids": ["1"]}, {"token_ids": [True]}, {"token_ids": [1, -1]},
    {"token_ids": [1], "finish_reason": 5}, {"token_ids": [1], "finish_reason": {"other": 1}},
]  # fmt: skip


@each_case("chunk", BAD_CHUNKS, ids=repr)
async def test_a_chunk_that_is_not_valid_is_the_engines_fault_and_closes_the_generator(chunk: Any) -> None:
    sink, engine = await serve(script_of(chunk, {"token_ids": [1], "finish_reason": "stop"}))
    assert sink.error is not None
    assert rule_of(sink.error).status == 500
    assert "chunk is invalid" in str(sink.error)
    assert engine.closed.is_set()


@each_case("ids", [(1, 2), [1, 2], [4294967295], []])
async def test_lists_and_tuples_of_u32_are_token_ids(ids: Any) -> None:
    sink, _ = await serve(script_of({"token_ids": ids, "finish_reason": "stop"}))
    assert sink.sent[0][0] == list(ids)


async def test_an_engine_may_reuse_its_list() -> None:
    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        shared = [0]
        for token in range(3):
            shared[0] = token
            yield {"token_ids": shared, "index": 0}
        yield {"token_ids": [], "finish_reason": "stop"}

    sink, _ = await serve(script)
    assert [entry[0] for entry in sink.sent[:3]] == [[0], [1], [2]]


@each_case("index", [1, -1, 7, "0", True])
async def test_a_choice_that_was_not_asked_for_is_an_error(index: Any) -> None:
    sink, _ = await serve(script_of({"token_ids": [1], "index": index}))
    assert isinstance(sink.error, Unknown)
    assert "invalid choice index" in str(sink.error)


async def test_an_engine_with_its_own_n_ends_when_every_choice_has() -> None:
    request = {"token_ids": [1], "sampling_options": {"n": 2}}
    items = [
        {"token_ids": [1], "index": 1, "finish_reason": "stop"},
        {"token_ids": [2], "index": 0},
        {"token_ids": [3], "index": 0, "finish_reason": "length"},
        {"token_ids": [4], "index": 0},
    ]
    sink, _ = await serve(script_of(*items), request=request)
    assert [(e[1], e[2]) for e in sink.sent] == [(1, "stop"), (0, None), (0, "length")]


REASONS = [
    ("stop", "stop"), ("eos", "eos"), ("length", "length"), ("content_filter", "content_filter"), ("STOP", "stop"),
    (" Length ", "length"), ("tool_calls", "stop"), ("", "stop"), ("whatever", "stop"), ("abort", "cancelled"),
    ("abort:x", "cancelled"), ("Aborted", "cancelled"), ("cancelled", "cancelled"),
]  # fmt: skip


@each_case(("said", "meant"), REASONS)
def test_finish_reasons_are_normalised(said: str, meant: str) -> None:
    assert normalise(said) == meant


@pytest.mark.parametrize(("said", "message"), [("error", "reported"), ("error: boom", "boom"), ({"error": "x"}, "x")])
async def test_an_error_reason_fails_the_stream_after_its_tokens(said: Any, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        normalise(said)
    sink, _ = await serve(script_of({"token_ids": [9], "finish_reason": said}))
    assert [entry[0] for entry in sink.sent] == [[9]]
    assert isinstance(sink.error, Unknown)


async def test_a_cancelled_terminal_nobody_asked_for_is_an_engine_shutdown() -> None:
    sink, _ = await serve(script_of({"token_ids": [1]}, {"token_ids": [], "finish_reason": "abort"}))
    assert isinstance(sink.error, EngineShutdown)


# -- cancellation ------------------------------------------------------------------------------------------------------


def waits_for_stop(started: asyncio.Event) -> Script:
    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1]}
        started.set()
        await context.async_killed_or_stopped()
        yield {"token_ids": [], "finish_reason": "cancelled", "completion_usage": {"completion_tokens": 1}}

    return script


async def test_a_stop_is_told_to_the_engine_once_and_its_own_cancelled_terminal_is_forwarded() -> None:
    started, context = asyncio.Event(), Context("id-1", {"k": "v"})
    task = asyncio.create_task(serve(waits_for_stop(started), context=context))
    await started.wait()
    context.metadata["k"] = "changed"
    context.stop_generating()
    context.kill()
    sink, engine = await task
    assert sink.sent[-1][2] == "cancelled"
    assert sink.sent[-1][3] == {"completion_usage": {"completion_tokens": 1}}
    assert [a.id() for a in engine.aborts] == ["id-1"]
    assert engine.aborts[0].metadata.copy() == {"k": "v"}


async def test_a_stopped_engine_that_just_ends_gets_its_cancelled_terminal_from_us() -> None:
    context = Context()

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        context.stop_generating()
        yield {"token_ids": [1]}

    sink, _ = await serve(script, context=context)
    assert sink.sent[-1][:3] == ([], 0, "cancelled")


@pytest.mark.parametrize("chunks", [0, 1])
async def test_a_kill_closes_a_generator_that_waits_for_something_else_within_100_ms(chunks: int) -> None:
    async def seconds() -> float:
        reached, context = asyncio.Event(), Context()

        async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
            for token in range(chunks):
                yield {"token_ids": [token]}
            reached.set()
            await asyncio.Event().wait()

        engine, sink = Scripted(script), ListSink()
        task = asyncio.create_task(TokenServing(engine).handle(dict(REQUEST), context, sink))
        await reached.wait()
        sink.ended = True  # what a plane does when the caller is gone
        before = asyncio.get_running_loop().time()
        context.kill()
        await task
        took = asyncio.get_running_loop().time() - before
        assert engine.closed.is_set()
        assert len(engine.aborts) == 1
        return took

    # Whoever else uses the machine may hold the processor for as long: not three times.
    assert min([await seconds() for _ in range(3)]) < 0.1


async def test_a_kill_while_waiting_for_credit_ends_the_request() -> None:
    context, sink = Context(), ListSink(credit=1)
    engine = Scripted(script_of({"token_ids": [1]}, {"token_ids": [2]}))
    task = asyncio.create_task(TokenServing(engine).handle(dict(REQUEST), context, sink))
    await sink.waiting.wait()
    sink.ended = True
    sink.room.set()
    context.kill()
    await task
    assert engine.closed.is_set()
    assert len(engine.aborts) == 1


async def test_a_stream_dropped_without_a_signal_is_closed_without_an_abort() -> None:
    sink = ListSink()

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        sink.ended = True
        yield {"token_ids": [1]}
        yield {"token_ids": [2]}

    engine = Scripted(script)
    await TokenServing(engine).handle(dict(REQUEST), Context(), sink)
    assert engine.aborts == []
    assert engine.closed.is_set()


async def test_cancelling_after_the_terminal_tells_the_engine_nothing() -> None:
    context = Context()
    _, engine = await serve(script_of({"token_ids": [1], "finish_reason": "stop"}), context=context)
    context.kill()
    await asyncio.sleep(0)
    assert engine.aborts == []


async def test_an_abort_that_raises_is_swallowed() -> None:
    started, context = asyncio.Event(), Context()
    engine, sink = Scripted(waits_for_stop(started)), ListSink()

    async def abort(context: Context) -> None:
        raise RuntimeError("abort boom")

    engine.abort = abort  # type: ignore[method-assign]
    task = asyncio.create_task(TokenServing(engine).handle(dict(REQUEST), context, sink))
    await started.wait()
    context.stop_generating()
    await task
    assert sink.error is None


@pytest.mark.parametrize("signal", ["token", "notify"])
async def test_decode_defers_the_abort_until_the_first_token(signal: str) -> None:
    stage, go, context = asyncio.Event(), asyncio.Event(), Context()
    aborts_before: list[int] = []

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": []}  # a handshake chunk does not count
        stage.set()
        await go.wait()
        aborts_before.append(len(engine.aborts))
        if signal == "notify":
            ctx.notify_first_token()
        else:
            yield {"token_ids": [1]}
        await asyncio.Event().wait()

    engine, sink = Scripted(script), ListSink()
    serving = TokenServing(engine, mode=DisaggregationMode.DECODE)
    task = asyncio.create_task(serving.handle(dict(REQUEST), context, sink))
    await stage.wait()
    sink.ended = True
    context.kill()
    go.set()
    await task
    assert aborts_before == [0]
    assert len(engine.aborts) == 1


async def test_decode_that_ends_before_its_first_token_is_never_aborted() -> None:
    context = Context()

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        context.stop_generating()
        yield {"token_ids": [], "finish_reason": "cancelled"}

    sink, engine = await serve(script, context=context, mode=DisaggregationMode.DECODE)
    assert engine.aborts == []
    assert sink.sent[-1][2] == "cancelled"


async def test_shutting_down_the_task_is_an_engine_shutdown_and_closes_the_generator() -> None:
    started = asyncio.Event()
    engine, sink = Scripted(waits_for_stop(started)), ListSink()
    task = asyncio.create_task(TokenServing(engine).handle(dict(REQUEST), Context(), sink))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(sink.error, EngineShutdown)
    assert engine.closed.is_set()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_cancellation_of_the_engines_own_ends_its_request_and_not_the_task(stopped: bool) -> None:
    context = Context()

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1]}
        if stopped:
            context.stop_generating()
        own = asyncio.create_task(asyncio.Event().wait())
        own.cancel()
        await own

    sink, engine = await serve(script, context=context)
    assert type(sink.error) is (Cancelled if stopped else EngineShutdown)
    assert isinstance(sink.error.__cause__, asyncio.CancelledError)
    assert engine.closed.is_set()


async def test_the_first_token_may_be_told_from_a_thread_of_the_engine() -> None:
    context, failures = Context(), list[BaseException]()

    def tell() -> None:
        try:
            context.notify_first_token()
        except BaseException as error:
            failures.append(error)

    async def script(request: Any, ctx: Context) -> AsyncGenerator[Any, None]:
        yield {"token_ids": []}
        context.kill()
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
        await asyncio.Event().wait()

    async with asyncio.timeout(PATIENCE_SECONDS):
        _, engine = await serve(script, context=context, mode=DisaggregationMode.DECODE)
    assert failures == []
    assert len(engine.aborts) == 1


async def test_an_engine_that_never_waits_lets_others_run() -> None:
    turns = 0

    async def ticker() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    tick = asyncio.create_task(ticker())
    count = 10 * CHUNKS_PER_TURN
    await serve(script_of(*({"token_ids": [1]} for _ in range(count)), {"token_ids": [], "finish_reason": "stop"}))
    tick.cancel()
    assert turns >= 10


async def test_concurrent_requests_do_not_share_state() -> None:
    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for token in request["token_ids"]:
            yield {"token_ids": [token]}
            await asyncio.sleep(0)
        yield {"token_ids": [], "finish_reason": "stop"}

    engine = Scripted(script)
    sinks = [ListSink() for _ in range(8)]
    serving = TokenServing(engine)
    await asyncio.gather(*(serving.handle({"token_ids": [n, n + 1]}, Context(), sink) for n, sink in enumerate(sinks)))
    assert [[e[0] for e in s.sent] for s in sinks] == [[[n], [n + 1], []] for n in range(8)]


# -- errors ------------------------------------------------------------------------------------------------------------


class CustomInvalid(InvalidArgument):
    pass


class Statused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


WRAPPED = [
    (InvalidArgument("too long"), InvalidArgument, "too long"),
    (CustomInvalid("sub"), CustomInvalid, "sub"),
    (DynamoException("bare"), DynamoException, "bare"),
    (EngineShutdown("gone"), EngineShutdown, "gone"),
    (ValueError("v"), Unknown, "ValueError: v"),
    (RuntimeError("r"), Unknown, "RuntimeError: r"),
    (TimeoutError("t"), ConnectionTimeout, "TimeoutError: t"),
    (asyncio.CancelledError(), Cancelled, "cancelled"),
    (GeneratorExit(), EngineShutdown, "shutting down"),
    (HttpError(422, "no"), InvalidArgument, '"code": 422'),
    (HttpError(503, "no"), Unknown, '"code": 503'),
    (Statused(415, "media"), InvalidArgument, '"code": 415'),
]


@each_case(("raised", "kind", "text"), WRAPPED, ids=lambda v: type(v).__name__)
def test_exceptions_are_wrapped_in_the_order_of_the_guide(raised: BaseException, kind: type, text: str) -> None:
    wrapped = wrap_error(raised)
    assert type(wrapped) is kind
    assert text in str(wrapped)
    assert wrapped is raised or wrapped.__cause__ is raised


@each_case(
    ("raised", "kind"),
    [
        (ValueError(), InvalidArgument),
        (TypeError(), InvalidArgument),
        (TimeoutError(), ConnectionTimeout),
        (ConnectionRefusedError(), CannotConnect),
        (ConnectionResetError(), Disconnected),
        (BrokenPipeError(), Disconnected),
        (KeyError(), Unknown),
    ],
)
def test_the_switch_restores_the_native_mapping(raised: Exception, kind: type) -> None:
    assert type(wrap_error(raised, map_builtin_errors=True)) is kind


def test_an_http_error_keeps_its_status() -> None:
    assert http_assertion(wrap_error(HttpError(418, "teapot"))) == (418, "teapot")


@pytest.mark.parametrize("where", [0, 1])
async def test_an_engine_exception_ends_the_stream_typed_after_what_was_sent(where: int) -> None:
    items: list[Any] = [{"token_ids": [1]}] * where
    sink, engine = await serve(script_of(*items, RuntimeError("boom")))
    assert len(sink.sent) == where
    assert isinstance(sink.error, Unknown)
    assert isinstance(sink.error.__cause__, RuntimeError)
    assert engine.closed.is_set()
    assert engine.aborts == []


async def test_an_engine_exception_is_logged_with_the_request_id_and_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await serve(script_of(RuntimeError("boom")), context=Context("req-7"))
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "req-7" in record.getMessage()
    assert record.exc_info is not None


async def test_a_generate_that_is_no_generator_is_an_unknown_error() -> None:
    engine, sink = Scripted(script_of()), ListSink()
    engine.generate = lambda request, context: 5  # type: ignore[assignment, method-assign, return-value]
    await TokenServing(engine).handle(dict(REQUEST), Context(), sink)
    assert isinstance(sink.error, Unknown)


@each_case("body", [None, 5, [1], "x", {}, {"token_ids": "abc"}, {"token_ids": {"a": 1}}])
async def test_a_request_that_is_none_is_declined_by_name(body: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"request|token_ids"):
        await TokenServing(Scripted(script_of())).handle(body, Context(), ListSink())


# -- raw engines -------------------------------------------------------------------------------------------------------


class Raw(RawEngine):
    def __init__(self) -> None:
        self.aborts = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def cleanup(self) -> None:
        pass

    async def abort(self, context: Context) -> None:
        self.aborts += 1

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for step in range(request["steps"]):
            yield {"step": step}
            await asyncio.sleep(0)
            if context.is_stopped():
                return


async def test_a_raw_engine_speaks_verbatim_and_ends_by_ending() -> None:
    sink = ListSink()
    await RawServing(Raw()).handle({"steps": 2}, Context(), sink)
    assert sink.objects == [{"data": {"step": 0}}, {"data": {"step": 1}}]
    assert sink.ended
    assert sink.error is None


async def test_a_raw_engine_is_aborted_once() -> None:
    engine, context, sink = Raw(), Context(), ListSink()
    task = asyncio.create_task(RawServing(engine).handle({"steps": 10**9}, context, sink))
    await asyncio.sleep(0)
    context.kill()
    await task
    assert engine.aborts == 1


async def test_an_engine_reads_the_id_of_a_hand_over_as_text_from_every_wire() -> None:
    seen: list[Any] = []

    async def script(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        seen.append(request["bootstrap_info"])
        yield {"token_ids": [], "index": 0, "finish_reason": "stop"}

    text = "00000000-0000-0000-0000-000000000007"
    for carried in (text, bytes(15) + b"\7"):
        await serve(script, request={**REQUEST, "bootstrap_info": {"bootstrap_room": 1, "handoff_id": carried}})
    assert seen == [{"bootstrap_room": 1, "handoff_id": text}] * 2
    with pytest.raises(InvalidArgument, match=r"bootstrap_info\.handoff_id"):
        await serve(script, request={**REQUEST, "bootstrap_info": {"handoff_id": b"short"}})
