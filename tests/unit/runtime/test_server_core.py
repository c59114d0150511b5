"""Admission, ends and deadlines of requests, whichever wire they came in on."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import pytest

from dynamo.errors import (
    Cancelled,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.calls.request_plane.core import ServerCore
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

PATH = "1f/ns/c/e"


class RecordingSink:
    """A sink that writes down how it ended."""

    def __init__(self) -> None:
        self.request_bytes = self.response_bytes = 0
        self.items: list[Any] = []
        self.over = asyncio.Event()
        self.error: BaseException | None = None
        self.ends = 0

    def send_tokens(self, token_ids: list[int], index: int = 0, finish_reason: Any = None, extra: Any = None) -> None:
        if not self.ended:
            self.items.append(token_ids)

    def send_token(self, token_id: int) -> bool:
        self.send_tokens([token_id])
        return not self.ended

    def send_object(self, envelope: dict[str, Any]) -> None:
        if not self.ended:
            self.items.append(envelope)

    def has_credit(self) -> bool:
        return True

    async def wait_credit(self) -> None:
        return

    def end(self, error: BaseException | None = None) -> None:
        self.ends += 1
        if self.ends == 1:
            self.error = error
            self.over.set()

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    async def outcome(self) -> BaseException | None:
        await asyncio.wait_for(self.over.wait(), PATIENCE_SECONDS)
        return self.error


def limited(run: int, queue: int) -> ServerCore:
    return ServerCore(RequestPlaneSettings(engine_request_limit=run, engine_queue_limit=queue))


class Gate:
    """A handler that runs until it is let go, and says who came in."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.open = asyncio.Event()

    async def handle(self, body: Any, context: Context, sink: ResponseSink) -> None:
        self.entered.append(body)
        await self.open.wait()


def dispatch(core: ServerCore, body: Any = None, context: Context | None = None) -> tuple[RecordingSink, Context]:
    sink, context = RecordingSink(), context or Context()
    core.dispatch(PATH, body, context, sink)
    return sink, context


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# -- shares of peers ----------------------------------------------------------------------------------------------


def flood(core: ServerCore, peer: str, count: int) -> list[RecordingSink]:
    sinks = [RecordingSink() for _ in range(count)]
    for number, sink in enumerate(sinks):
        core.dispatch(PATH, f"{peer}{number}", Context(), sink, peer)
    return sinks


async def test_a_flood_of_one_peer_leaves_a_running_place_for_another() -> None:
    core, gate = limited(16, 100), Gate()
    core.register(PATH, gate.handle)
    core.shares.joined("a")
    core.shares.joined("b")
    flood(core, "a", 60)
    await turns()
    assert core.running == 14
    flood(core, "b", 1)
    await turns()
    assert "b0" in gate.entered
    assert len([each for each in gate.entered if each[0] == "a"]) == 14
    gate.open.set()
    await turns(20)
    assert (len(gate.entered), core.running, core.queued) == (61, 0, 0)


async def test_a_peer_that_is_alone_has_all_running_places() -> None:
    core, gate = limited(16, 100), Gate()
    core.register(PATH, gate.handle)
    core.shares.joined("a")
    core.shares.joined("b")
    core.shares.left("b")
    flood(core, "a", 60)
    await turns()
    assert core.running == 16
    gate.open.set()
    await turns(20)


async def test_places_that_few_peers_compete_for_are_not_divided() -> None:
    core, gate = limited(4, 100), Gate()
    core.register(PATH, gate.handle)
    core.shares.joined("a")
    core.shares.joined("b")
    flood(core, "a", 10)
    await turns()
    assert core.running == 4
    gate.open.set()
    await turns(20)


# -- paths --------------------------------------------------------------------------------------------------------


async def test_a_handler_gets_the_request_and_returning_ends_the_stream() -> None:
    core = limited(1, 0)
    seen: list[Any] = []

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        seen.append((body, context.id()))
        sink.send_tokens([1, 2])

    core.register(PATH, handle)
    sink, _ = dispatch(core, {"n": 1}, Context("r1"))
    assert await sink.outcome() is None
    assert (seen, sink.items, sink.ends) == ([({"n": 1}, "r1")], [[1, 2]], 1)
    await turns()
    assert (core.running, core.queued) == (0, 0)


async def test_an_unknown_path_is_declined_at_once() -> None:
    core = limited(1, 0)
    sink = RecordingSink()
    with pytest.raises(WorkerUnavailable, match=r"^Server unavailable: unknown endpoint 1f/ns/c/e$"):
        core.dispatch(PATH, None, Context(), sink)
    assert sink.ends == 0


async def test_a_path_is_taken_once_and_free_again_after_it_was_unregistered() -> None:
    core, gate = limited(2, 0), Gate()
    core.register(PATH, gate.handle)
    with pytest.raises(ValueError, match="already served"):
        core.register(PATH, gate.handle)
    sink, _ = dispatch(core)
    core.unregister(PATH)
    core.unregister("never there")
    with pytest.raises(WorkerUnavailable):
        dispatch(core)
    core.register(PATH, gate.handle)
    gate.open.set()
    assert await sink.outcome() is None  # what was in flight went on


# -- admission ----------------------------------------------------------------------------------------------------


async def test_one_runs_one_waits_and_the_third_is_declined() -> None:
    core, gate, rejected = limited(1, 1), Gate(), list[int]()
    core.register(PATH, gate.handle)
    core.observe(waited=lambda _: None, rejected=lambda: rejected.append(1))
    first, _ = dispatch(core, 1)
    second, _ = dispatch(core, 2)
    with pytest.raises(Overloaded, match=r"^Server overloaded: worker at capacity$"):
        dispatch(core, 3)
    await turns()
    assert (gate.entered, core.running, core.queued, sum(rejected)) == ([1], 1, 1, 1)
    gate.open.set()
    assert await first.outcome() is None
    assert await second.outcome() is None
    dispatch(core, 4)
    await turns()
    assert gate.entered == [1, 2, 4]


async def test_requests_start_in_the_order_they_came() -> None:
    core, gate = limited(2, 100), Gate()
    core.register(PATH, gate.handle)
    gate.open.set()
    sinks = [dispatch(core, n)[0] for n in range(50)]
    for sink in sinks:
        await sink.outcome()
    assert gate.entered == list(range(50))


async def test_nobody_overtakes_the_queue() -> None:
    core, entered = limited(1, 2), []

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        entered.append(body)
        if body == "first":
            sink.end()
            dispatch(core, "late")  # a place is about to become free, but "second" was here before

    core.register(PATH, handle)
    dispatch(core, "first")
    second, _ = dispatch(core, "second")
    await second.outcome()
    await turns()
    assert entered == ["first", "second", "late"]


async def test_without_an_engine_limit_the_pool_and_the_queue_decide() -> None:
    core, gate = ServerCore(RequestPlaneSettings(worker_pool_size=2, work_queue_size=3)), Gate()
    core.register(PATH, gate.handle)
    for n in range(5):
        dispatch(core, n)
    with pytest.raises(Overloaded):
        dispatch(core, 5)
    assert (core.running, core.queued) == (2, 3)
    await core.close(timeout=0.01)


def test_the_limits_come_from_the_environment() -> None:
    env = {
        "DYN_TCP_WORKER_POOL_SIZE": "7",
        "DYN_TCP_WORK_QUEUE_SIZE": "8",
        "DYN_ENGINE_REQUEST_LIMIT": "3",
        "DYN_TCP_RPC_HOST": "10.1.2.3",
        "DYN_TCP_RPC_PORT": "900",
    }
    settings = RequestPlaneSettings.from_env(env)
    assert (settings.worker_pool_size, settings.work_queue_size) == (7, 8)
    assert (settings.engine_request_limit, settings.engine_queue_limit) == (3, 16)
    assert (settings.rpc_host, settings.rpc_port) == ("10.1.2.3", 900)
    assert RequestPlaneSettings.from_env({}) == RequestPlaneSettings()


# -- cancellation -------------------------------------------------------------------------------------------------


@each_case("how", ["stop_generating", "kill"])
@each_case("where", ["on the loop", "in a thread"])
async def test_a_cancelled_request_leaves_the_queue_and_its_place_is_free(how: str, where: str) -> None:
    core, gate = limited(1, 1), Gate()
    core.register(PATH, gate.handle)
    dispatch(core, "running")
    waiting, context = dispatch(core, "waiting")
    if where == "in a thread":
        thread = threading.Thread(target=getattr(context, how))
        thread.start()
        await asyncio.to_thread(thread.join)
    else:
        getattr(context, how)()
        assert core.queued == 0
    assert isinstance(await waiting.outcome(), Cancelled)
    following, _ = dispatch(core, "following")
    gate.open.set()
    assert await following.outcome() is None
    assert gate.entered == ["running", "following"]


@pytest.mark.parametrize("how", ["stop_generating", "kill"])
async def test_a_request_that_is_cancelled_on_arrival_is_never_started(how: str) -> None:
    core, gate = limited(1, 0), Gate()
    core.register(PATH, gate.handle)
    context = Context()
    getattr(context, how)()
    sink, _ = dispatch(core, "gone", context)
    assert isinstance(await sink.outcome(), Cancelled)
    await turns()
    assert gate.entered == []


async def test_a_stop_reaches_a_running_handler_through_its_context_only() -> None:
    core = limited(1, 0)

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()
        sink.send_tokens([7])

    core.register(PATH, handle)
    sink, context = dispatch(core)
    await turns()
    context.stop_generating()
    assert await sink.outcome() is None
    assert sink.items == [[7]]


# -- deadlines ----------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_a_running_request_with_a_timeout_and_kills_it() -> None:
    core, gate = limited(1, 0), Gate()
    core.register(PATH, gate.handle)
    sink, context = dispatch(core, 1, Context(deadline=asyncio.get_running_loop().time() + 0.01))
    assert isinstance(await sink.outcome(), ResponseTimeout)
    assert context.is_killed()
    gate.open.set()


async def test_a_deadline_also_passes_in_the_queue() -> None:
    core, gate = limited(1, 1), Gate()
    core.register(PATH, gate.handle)
    dispatch(core, 1)
    sink, _ = dispatch(core, 2, Context(deadline=asyncio.get_running_loop().time() + 0.01))
    assert isinstance(await sink.outcome(), ResponseTimeout)
    gate.open.set()
    await turns()
    assert (gate.entered, core.queued) == ([1], 0)


async def test_a_deadline_that_was_kept_is_forgotten() -> None:
    core, gate = limited(1, 0), Gate()
    core.register(PATH, gate.handle)
    gate.open.set()
    sink, context = dispatch(core, 1, Context(deadline=asyncio.get_running_loop().time() + 0.02))
    assert await sink.outcome() is None
    await asyncio.sleep(0.03)
    assert not context.is_killed()


# -- errors -------------------------------------------------------------------------------------------------------


async def failing(error: BaseException, core: ServerCore | None = None) -> BaseException | None:
    core = core or limited(1, 0)

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        raise error

    core.register(PATH, handle)
    sink, _ = dispatch(core, None, Context("r-17"))
    outcome = await sink.outcome()
    await turns()
    assert core.running == 0
    return outcome


@each_case("error", [InvalidArgument("no"), EngineShutdown("bye"), DynamoException("?"), Overloaded()])
async def test_a_typed_error_arrives_as_it_is(error: DynamoException) -> None:
    assert await failing(error) is error


@each_case("error", [ValueError("odd"), KeyError("k"), RuntimeError(), OSError(2, "gone")])
async def test_any_other_error_is_unknown_caused_by_it_and_logged_with_its_traceback(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        outcome = await failing(error)
    assert isinstance(outcome, Unknown)
    assert outcome.__cause__ is error
    assert str(outcome) == f"{type(error).__name__}: {error}"
    (record,) = caplog.records
    assert "r-17" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_a_handler_that_fails_as_its_stream_is_cut_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, begun = limited(1, 0), asyncio.Event()

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        begun.set()
        await context.async_killed_or_stopped()
        raise RuntimeError("interrupted")

    core.register(PATH, handle)
    sink, _ = dispatch(core, None, Context("r-17"))
    await begun.wait()
    await core.close()
    assert isinstance(await sink.outcome(), EngineShutdown)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("code", "kind"), [(418, InvalidArgument), (400, InvalidArgument), (503, Unknown)])
async def test_an_asserted_status_travels_in_the_message(code: int, kind: type[DynamoException]) -> None:
    outcome = await failing(HttpError(code, "why"))
    assert type(outcome) is kind
    assert json.loads(str(outcome)) == {"message": "why", "code": code}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
async def test_control_flow_that_escapes_a_handler_is_a_shutdown(error: BaseException) -> None:
    assert isinstance(await failing(error), EngineShutdown)


async def test_items_before_an_error_stay() -> None:
    core = limited(1, 0)

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        sink.send_tokens([1])
        raise InvalidArgument("then no")

    core.register(PATH, handle)
    sink, _ = dispatch(core)
    assert isinstance(await sink.outcome(), InvalidArgument)
    assert sink.items == [[1]]


# -- close --------------------------------------------------------------------------------------------------------


async def test_close_ends_everything_kills_the_contexts_and_waits_for_the_handlers() -> None:
    core, left = limited(1, 1), []

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        await context.async_killed_or_stopped()
        left.append(body)

    core.register(PATH, handle)
    running, context = dispatch(core, "running")
    waiting, _ = dispatch(core, "waiting")
    await turns()
    await core.close()
    assert (left, context.is_killed(), core.running, core.queued) == (["running"], True, 0, 0)
    assert isinstance(running.error, EngineShutdown)
    assert isinstance(waiting.error, EngineShutdown)
    with pytest.raises(WorkerUnavailable):
        dispatch(core)
    await core.close()


async def test_close_cancels_a_handler_that_ignores_its_kill() -> None:
    core, cancelled = limited(1, 0), []

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    core.register(PATH, handle)
    dispatch(core)
    await turns()
    await core.close(timeout=0.01)
    assert (cancelled, core.running) == ([True], 0)


async def test_close_gives_up_on_a_handler_that_ignores_everything(caplog: pytest.LogCaptureFixture) -> None:
    core, free = limited(1, 0), asyncio.Event()

    async def handle(body: Any, context: Context, sink: ResponseSink) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    core.register(PATH, handle)
    dispatch(core, None, Context("stubborn"))
    await turns()
    await core.close(timeout=0.01)
    assert "stubborn" in caplog.text
    free.set()
    await turns()
    assert core.running == 0


async def test_a_task_cancelled_before_its_first_step_still_ends_its_sink() -> None:
    core, gate = limited(1, 0), Gate()
    core.register(PATH, gate.handle)
    sink, _ = dispatch(core, None, Context("early"))
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "request early")
    task.cancel()
    assert isinstance(await sink.outcome(), EngineShutdown)
    assert gate.entered == []
