from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from dynamo.worker.signals import Deadline, SignalGuard
from support.patience import PATIENCE_SECONDS

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def run_on(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(main: Coroutine[Any, Any, None]) -> None:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(main)
        assert {number: signal.getsignal(number) for number in before} == before

    return run


def nothing() -> None:
    pass


def load_weights(seconds: float) -> None:
    """What an engine may do in `start`: one blocking call."""
    time.sleep(seconds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_every_time_and_by_name(
    number: signal.Signals, run_on: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def main() -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        with SignalGuard(asyncio.get_running_loop()) as guard:
            assert guard.listen(heard.put_nowait, at_once=nothing)
            for _ in range(2):
                os.kill(os.getpid(), number)
                assert await asyncio.wait_for(heard.get(), PATIENCE_SECONDS) == number.name

    run_on(main())


def test_the_deadline_is_told_even_while_the_loop_is_blocked(
    run_on: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        told: list[float] = []
        heard = asyncio.Event()
        with SignalGuard(asyncio.get_running_loop()) as guard:
            guard.listen(lambda _name: heard.set(), at_once=lambda: told.append(time.monotonic()))
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            load_weights(0.3)
            blocked_until = time.monotonic()
            assert told
            assert told[0] < blocked_until - 0.1
            assert not heard.is_set()
            await asyncio.wait_for(heard.wait(), PATIENCE_SECONDS)

    run_on(main())


def test_an_engine_cannot_take_the_two_signals_and_may_have_all_others(
    run_on: Callable[[Coroutine[Any, Any, None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[str] = asyncio.Queue()
        with SignalGuard(loop) as guard, caplog.at_level(logging.INFO):
            guard.listen(heard.put_nowait, at_once=nothing)
            for number in (signal.SIGTERM, signal.SIGINT):
                assert loop.add_signal_handler(number, heard.put_nowait, "engine") is None
                assert loop.remove_signal_handler(number) is False
            assert caplog.text.count("not installed") == 2
            loop.add_signal_handler(signal.SIGUSR1, heard.put_nowait, "usr1")
            os.kill(os.getpid(), signal.SIGUSR1)
            assert await asyncio.wait_for(heard.get(), PATIENCE_SECONDS) == "usr1"
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(heard.get(), PATIENCE_SECONDS) == "SIGTERM"
            loop.remove_signal_handler(signal.SIGUSR1)
        loop.add_signal_handler(signal.SIGUSR1, nothing)  # afterwards the loop is as it was
        assert loop.remove_signal_handler(signal.SIGUSR1)

    run_on(main())


async def test_in_another_thread_signals_are_left_alone() -> None:
    def elsewhere() -> bool:
        async def main() -> bool:
            with SignalGuard(asyncio.get_running_loop()) as guard:
                return guard.listen(lambda _: None, at_once=nothing)

        return asyncio.run(main())

    assert await asyncio.to_thread(elsewhere) is False


def test_a_deadline_that_passes_ends_the_process_with_143_and_says_911(caplog: pytest.LogCaptureFixture) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with Deadline(0.05, force_exit=ended.put) as deadline:
        deadline.arm()
        assert ended.get(timeout=PATIENCE_SECONDS) == 143
    assert "Graceful shutdown exceeded 0.05s; force-exiting with code 911." in caplog.text
    assert "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT" in caplog.text


def test_only_the_first_arm_counts() -> None:
    ended: queue.SimpleQueue[float] = queue.SimpleQueue()
    with Deadline(0.2, force_exit=lambda _: ended.put(time.monotonic())) as deadline:
        for _ in range(4):
            time.sleep(0.06)
            last = time.monotonic()
            deadline.arm()
        assert ended.get(timeout=PATIENCE_SECONDS) - last < 0.2


@pytest.mark.parametrize("armed", [False, True])
def test_a_worker_that_leaves_in_time_is_left_alone(armed: bool) -> None:
    ended: list[int] = []
    with Deadline(60.0, force_exit=ended.append) as deadline:
        if armed:
            deadline.arm()
    assert not deadline._thread.is_alive()
    assert ended == []
