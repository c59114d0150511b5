"""Background work has an owner, and a wait for the first of several leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from dynamo.errors import CannotConnect
from dynamo.runtime.base.tasks import AttemptCancelled, Background, SingleFlight, cut_when, first_of
from dynamo.runtime.base.timers import LoopTimer, loop_timeout
from dynamo.runtime.calls.request_plane.dial import Dialled, Dialler
from dynamo.runtime.calls.request_plane.security import PlaneSecurity
from dynamo.runtime.discovery import follow as following
from dynamo.runtime.discovery.base import Change, Delete, Put
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub


async def hang(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def fail() -> None:
    raise KeyError("broken")


# -- the first of several


async def test_the_first_that_is_done_is_named_and_the_others_are_cancelled() -> None:
    ended = asyncio.Event()
    assert await first_of(hang(ended), asyncio.sleep(0)) == 1
    assert ended.is_set()


async def test_what_the_first_raises_is_raised_and_nothing_runs_on() -> None:
    ended = asyncio.Event()
    with pytest.raises(KeyError):
        await first_of(hang(ended), fail())
    assert ended.is_set()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    ended = asyncio.Event()
    waiting = asyncio.create_task(first_of(hang(ended)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


# -- work that is cut


async def test_work_is_cut_when_it_is_due_and_the_task_goes_on() -> None:
    ended, answers = asyncio.Event(), [0.001, 0.001, 0.0]
    with pytest.raises(TimeoutError):
        await cut_when(hang(ended), 0.0, lambda: answers.pop(0))
    assert ended.is_set()
    assert answers == []
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await cut_when(asyncio.sleep(0, "whole"), 0.0, lambda: 0.001) == "whole"


async def test_work_that_may_take_as_long_as_it_takes_is_not_cut() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    def never() -> None:
        asked.set()

    work = asyncio.create_task(cut_when(go.wait(), 0.0, never))
    await asked.wait()
    go.set()
    assert await work is True


async def test_a_cancellation_from_elsewhere_goes_before_the_cut() -> None:
    ended = asyncio.Event()

    def both() -> float:
        work.cancel()
        return 0.0

    work = asyncio.create_task(cut_when(hang(ended), 0.0, both))
    with pytest.raises(asyncio.CancelledError):
        await work
    assert ended.is_set()


async def test_work_that_turns_the_cut_into_an_error_of_its_own_leaves_no_cancellation() -> None:
    async def turned() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("broken") from None

    with pytest.raises(KeyError):
        await cut_when(turned(), 0.0, lambda: 0.0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


# -- background work


async def test_leaving_the_block_ends_what_runs_in_it() -> None:
    ended = asyncio.Event()
    async with Background() as background:
        background.start(hang(ended), "hang")
        await asyncio.sleep(0)
    assert ended.is_set()
    with pytest.raises(RuntimeError, match="late was started after"):
        background.start(hang(ended), "late")


async def test_a_crash_ends_the_block_and_leaves_it() -> None:
    ended = asyncio.Event()

    async def block() -> None:
        async with Background() as background:
            background.start(hang(ended), "hang")
            background.start(fail(), "fail")
            await asyncio.Event().wait()

    with pytest.raises(KeyError, match="broken"):
        await block()
    assert ended.is_set()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_the_blocks_own_error_is_not_hidden() -> None:
    async def block() -> None:
        async with Background() as background:
            background.start(fail(), "fail")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()


async def test_a_cancelled_block_stays_cancelled() -> None:
    ended = asyncio.Event()

    async def block() -> None:
        async with Background() as background:
            background.start(hang(ended), "hang")
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended.is_set()


async def test_without_a_block_a_crash_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()
    task = background.start(fail(), "the work")
    await asyncio.wait({task})
    await background.close()
    assert [record.getMessage() for record in caplog.records] == ["the work failed"]


async def test_what_the_caller_awaits_is_the_callers_to_report(caplog: pytest.LogCaptureFixture) -> None:
    async with Background() as background:
        with pytest.raises(KeyError):
            await background.run(fail(), "the work")
        assert len(background) == 0
    assert caplog.records == []


async def test_closing_ends_what_the_caller_awaits_and_cancels_no_caller() -> None:
    background = Background()
    ended = asyncio.Event()
    caller = asyncio.create_task(background.run(hang(ended), "hang"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await background.close()
    await asyncio.wait({caller})
    assert ended.is_set()
    assert (caller.cancelled(), caller.cancelling()) == (True, 0)


async def test_work_that_ignores_its_cancellation_is_named_and_left() -> None:
    background = Background()
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    task = background.start(deaf(), "deaf")
    await asyncio.sleep(0)
    assert await background.close(0.01) == {task}
    release.set()
    await background.wait()
    assert await background.close() == set()


async def test_a_wait_with_a_limit_leaves_the_work_alone() -> None:
    ended = asyncio.Event()
    async with Background() as background:
        background.start(hang(ended), "hang")
        await background.wait(0.01)
        assert (len(background), ended.is_set()) == (1, False)


# -- one attempt for many callers


async def test_callers_share_the_attempt_that_runs_and_a_later_one_begins_another() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    begun = 0

    async def attempt() -> int:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0)
        return begun

    assert await asyncio.gather(*(flights.run("a", attempt, "a") for _ in range(3))) == [1, 1, 1]
    assert await flights.run("a", attempt, "a") == 2
    assert await asyncio.gather(flights.run("a", attempt, "a"), flights.run("b", attempt, "b")) == [4, 4]


async def test_a_failed_attempt_fails_for_all_of_its_callers() -> None:
    flights: SingleFlight[str, None] = SingleFlight()
    failures = await asyncio.gather(*(flights.run("a", fail, "a") for _ in range(2)), return_exceptions=True)
    assert [type(failure) for failure in failures] == [KeyError, KeyError]


async def test_a_caller_that_leaves_does_not_end_the_attempt_of_the_others() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    go = asyncio.Event()

    async def attempt() -> str:
        await go.wait()
        return "made"

    leaving, staying = (asyncio.create_task(flights.run("a", attempt, "a")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    go.set()
    assert await staying == "made"


async def test_cancelled_attempts_are_an_error_to_their_callers_and_no_cancellation() -> None:
    flights: SingleFlight[str, None] = SingleFlight()
    waiting = asyncio.create_task(flights.run("a", asyncio.Event().wait, "a"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    flights.cancel()
    with pytest.raises(AttemptCancelled):
        await waiting
    with pytest.raises(RuntimeError):
        await flights.run("a", fail, "a")


# -- following a prefix


class Flaky(MemoryDiscovery):
    """A store whose watches can be broken."""

    def __init__(self, hub: MemoryHub) -> None:
        super().__init__(hub)
        self.broken = asyncio.Event()
        self.refuses = False

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[list[Change]]]:
        if self.refuses:
            raise CannotConnect("the store is away")
        self.broken.clear()
        async with super().watch(prefix) as changes:

            async def until_broken() -> AsyncIterator[list[Change]]:
                while True:
                    next_batch = asyncio.ensure_future(anext(changes, None))
                    broken = asyncio.ensure_future(self.broken.wait())
                    try:
                        await asyncio.wait({next_batch, broken}, return_when=asyncio.FIRST_COMPLETED)
                        if broken.done():
                            raise CannotConnect("the watch broke")
                        if (batch := next_batch.result()) is None:
                            return
                        yield batch
                    finally:
                        next_batch.cancel()
                        broken.cancel()
                        await asyncio.gather(next_batch, broken, return_exceptions=True)

            async with aclosing(until_broken()) as guarded:  # type: ignore[type-var]
                yield guarded


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Flaky]:
    monkeypatch.setattr(following, "RETRY_SECONDS", 0)
    found = Flaky(MemoryHub())
    await found.start()
    yield found
    await found.close()


A, B, C = "v1/instances/ns/c/e/a", "v1/instances/ns/c/e/b", "v1/instances/ns/c/e/c"


async def test_after_a_break_the_difference_is_reported(store: Flaky) -> None:
    await store.put(A, b"1")
    await store.put(B, b"1")
    async with aclosing(following.follow(store, "v1/instances")) as changes:
        assert await anext(changes) == [Put(A, b"1"), Put(B, b"1")]
        await store.delete(A)
        assert await anext(changes) == [Delete(A)]
        after = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        store.broken.set()
        await store.delete(B)
        await store.put(C, b"2")
        assert await after == [Delete(B), Put(C, b"2")]


async def test_a_batch_that_its_reader_did_not_finish_is_reported_again(store: Flaky) -> None:
    known: set[str] = set()
    await store.put(A, b"1")
    await store.put(B, b"1")
    async with aclosing(following.follow(store, "v1/instances", known)) as changes:
        assert await anext(changes) == [Put(A, b"1"), Put(B, b"1")]
    await store.delete(A)
    async with aclosing(following.follow(store, "v1/instances", known)) as changes:
        assert await anext(changes) == [Delete(A), Put(B, b"1")]


async def test_the_end_of_the_store_is_the_end(store: Flaky) -> None:
    async with aclosing(following.follow(store, "v1/instances")) as changes:
        assert await anext(changes) == []
        end = asyncio.ensure_future(anext(changes, None))
        await asyncio.sleep(0)
        await store.close()
        assert await end is None


async def test_a_first_watch_that_fails_raises_where_the_caller_wants_it(store: Flaky) -> None:
    store.refuses = True
    with pytest.raises(CannotConnect):
        await anext(following.follow(store, "v1/instances", raises_first=True))


# -- a limit of time


class Reached(Dialled):
    usable = True
    transport: asyncio.BaseTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def close(self) -> None:
        self.transport.close()


class Timed:
    def __init__(self, seconds: float) -> None:
        self.fired = asyncio.Event()
        self.timer = LoopTimer(seconds, self.fire)

    def fire(self) -> None:
        self.fired.set()


async def test_a_timer_that_has_fired_or_was_cancelled_keeps_nothing() -> None:
    fires, is_cancelled = Timed(0.01), Timed(60.0)
    kept = weakref.ref(fires), weakref.ref(is_cancelled)
    await fires.fired.wait()
    is_cancelled.timer.cancel()
    gc.disable()
    del fires, is_cancelled
    gc.enable()
    assert [each() for each in kept] == [None, None]


async def test_a_connection_that_came_while_the_loop_stood_still_was_in_time() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    dialler: Dialler[Reached] = Dialler(
        lambda where: Reached(), lambda where, made: None, timeout_seconds=0.2, security=PlaneSecurity()
    )
    dialling = asyncio.ensure_future(dialler.connect(host, port))
    await asyncio.sleep(0)  # its task has begun
    asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # the machine is suspended
    (await dialling).close()
    server.close()


@pytest.mark.parametrize("after", [0.0, 0.16])  # in the first quarter, and in the last one
async def test_what_does_not_come_in_time_is_a_timeout_and_a_standstill_counts_once(after: float) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(after, time.sleep, 0.3)
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.2):
            await asyncio.Event().wait()
    assert (
        loop.time() - began >= after + 0.3 + 0.05
    )  # it was not over at once, as a timer of the loop's own would have been
