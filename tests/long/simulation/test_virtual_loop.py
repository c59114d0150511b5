"""The loop that everything simulated runs on."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from dynamo.testing.simulation import NothingWillHappen, OutsideWorld, VirtualLoop, run_virtual


def test_a_year_passes_in_no_time() -> None:
    async def main() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(365 * 86400)
        return asyncio.get_running_loop().time() - began

    began = time.monotonic()
    assert run_virtual(main()) == pytest.approx(365 * 86400)
    assert time.monotonic() - began < 1.0


def test_timers_fire_in_the_order_of_their_times() -> None:
    fired: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (3, 1, 2):
            loop.call_later(number, fired.append, number)
        await asyncio.sleep(4)

    run_virtual(main())
    assert fired == [1, 2, 3]


def test_a_timeout_is_a_timer_like_any_other() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()

    run_virtual(main())


def test_after_a_jump_every_overdue_timer_fires_late_but_fires() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        began = loop.time()
        fired: list[float] = []
        for due in (1.0, 2.0):
            loop.call_later(due, lambda: fired.append(loop.time() - began))
        loop.jump(10.0)
        await asyncio.sleep(0.001)
        return fired

    assert run_virtual(main()) == pytest.approx([10.0, 10.0])


def test_a_program_that_waits_for_ever_is_told_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingWillHappen):
        run_virtual(main())


def test_executors_run_inline() -> None:
    async def main() -> tuple[int, int]:
        return await asyncio.to_thread(threading.get_ident), threading.get_ident()

    first, second = run_virtual(main())
    assert first == second


def test_what_an_executor_raises_arrives() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run_virtual(main())


def test_real_sockets_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(OutsideWorld, match="memory planes"):
            await asyncio.open_connection("127.0.0.1", 1)

    run_virtual(main())


def test_call_soon_threadsafe_is_for_the_loops_own_thread() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        said: list[str] = []
        loop.call_soon_threadsafe(said.append, "own")

        def foreign() -> None:
            try:
                loop.call_soon_threadsafe(said.append, "foreign")
            except OutsideWorld:
                said.append("refused")

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        await asyncio.sleep(0)
        return said

    assert "refused" in run_virtual(main())


def order(shuffle: random.Random | None) -> list[int]:
    ran: list[int] = []

    async def main() -> None:
        for number in range(10):
            asyncio.get_running_loop().call_soon(ran.append, number)
        await asyncio.sleep(1)

    run_virtual(main(), loop=VirtualLoop(shuffle=shuffle))
    return ran


def test_callbacks_run_first_in_first_out() -> None:
    assert order(None) == list(range(10))


def test_a_shuffled_loop_repeats_itself() -> None:
    assert order(random.Random(1)) == order(random.Random(1)) != list(range(10))


def test_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        return task

    run_virtual(main())
    assert ended == ["cancelled"]
