"""The watchdog of the event loop: what counts as a block, and whose it is."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynamo.runtime.observe.loop_watchdog import LogLimit, LoopWatchdog, place_of
from dynamo.runtime.observe.metrics import MetricsRegistry
from support.cases import each_case
from support.patience import PATIENCE_SECONDS


def load(path: Path, source: str) -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait(condition: Callable[[], bool]) -> None:
    """Block the calling thread, and so its event loop."""
    ends_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.005)


async def test_the_place_is_the_engines_line_and_not_the_librarys(tmp_path: Path) -> None:
    engine = load(
        tmp_path / "engine.py",
        "import json\n\ndef generate(look):\n    return json.loads('{}', object_hook=lambda found: look())\n",
    )
    found = engine.generate(lambda: place_of(sys._getframe(1)))
    assert found == ("engine.py:4 (<lambda>)", True)


async def test_an_installed_engine_is_named_when_nothing_of_its_user_runs(tmp_path: Path) -> None:
    engine = load(
        tmp_path / "site-packages" / "engine.py", "def generate(look, frame):\n    look.append(place_of(frame()))\n"
    )
    found: list[tuple[str, bool] | None] = []
    vars(engine)["place_of"] = place_of
    asyncio.get_running_loop().call_soon(engine.generate, found, sys._getframe)
    await asyncio.sleep(0)
    assert found == [("engine.py:2 (generate)", True)]


@each_case(
    ("room", "is_the_engines"), [("worker", False), ("runtime", False), ("contract", False), ("reference", True)]
)
async def test_a_place_in_the_machinery_is_not_the_engines(room: str, is_the_engines: bool) -> None:
    package = importlib.import_module(f"dynamo.{room}")
    file = str(Path(package.__file__ or "").with_name("block.py"))
    names: dict[str, Any] = {}
    exec(compile("def block(found, look, frame):\n    found.append(look(frame()))\n", file, "exec"), names)
    found: list[tuple[str, bool] | None] = []
    asyncio.get_running_loop().call_soon(names["block"], found, place_of, sys._getframe)
    await asyncio.sleep(0)
    assert found == [("block.py:2 (block)", is_the_engines)]


async def test_a_loop_that_waits_blocks_nobody() -> None:
    loop_thread, found = threading.get_ident(), []
    await asyncio.to_thread(
        lambda: (wait(lambda: place_of(sys._current_frames()[loop_thread]) is None), found.append(True))
    )
    assert found == [True]


async def test_a_block_is_trouble_while_it_lasts_and_counted_when_it_is_over() -> None:
    metrics = MetricsRegistry()
    watchdog = LoopWatchdog(metrics, 0.2)
    watchdog.start()
    try:
        assert (watchdog.trouble(), watchdog.describe_last_block()) == (None, None)
        wait(lambda: watchdog.trouble() is not None)
        during = watchdog.trouble()
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while watchdog.last_block is None and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)
    finally:
        watchdog.close()
    assert during is not None
    assert "test_loop_watchdog.py:" in during
    assert "(wait)" in during
    assert watchdog.trouble() is None
    assert watchdog.last_block is not None
    assert watchdog.last_block.seconds >= 0.2
    assert "\ndynamo_work_handler_event_loop_blocks_total 1\n" in metrics.expose().decode()


async def test_time_in_which_the_process_stood_still_is_no_block() -> None:
    """The clock leaps for everybody, as after a machine was suspended."""
    leap = 0.0
    watchdog = LoopWatchdog(MetricsRegistry(), 0.2, clock=lambda: time.monotonic() + leap)
    watchdog.start()
    try:
        await asyncio.sleep(0.05)
        leap = 1000.0
        await asyncio.sleep(0.6)
        assert (watchdog.last_block, watchdog.trouble()) == (None, None)
    finally:
        watchdog.close()


def test_a_watchdog_that_was_not_closed_ends_with_its_loop() -> None:
    async def leave() -> LoopWatchdog:
        watchdog = LoopWatchdog(MetricsRegistry(), 0.2)
        watchdog.start()
        return watchdog

    watchdog = asyncio.run(leave())
    assert watchdog._thread is not None
    watchdog._thread.join(PATIENCE_SECONDS)
    assert not watchdog._thread.is_alive()
    assert watchdog.trouble() is None


async def test_a_threshold_of_zero_watches_nothing() -> None:
    before = threading.active_count()
    watchdog = LoopWatchdog(MetricsRegistry(), 0.0)
    watchdog.start()
    assert threading.active_count() == before
    watchdog.close()


def test_two_lines_come_through_per_interval_and_the_next_one_counts_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    log = LogLimit(lambda: now)
    for number in range(7):
        log.warning("line %d", number)
    now = 110.0
    log.warning("line %d", 7)
    assert [record.getMessage() for record in caplog.records] == [
        "line 0",
        "line 1",
        "line 7 (5 more lines of this kind were left out)",
    ]
