"""Reports code that blocks the event loop: where it stands, for how long, how often.

The loop stamps the time every `TICK_SECONDS`. A thread sleeps until the last stamp is older than the threshold; only then
does it read the loop's stack. So a healthy process pays ten timestamps and about one wake-up a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from msgspec import Struct

import dynamo
from dynamo.runtime.observe.metrics import Family, MetricsRegistry

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 0.1  # while a block lasts: how often the thread checks whether it is over, and answers probes
LOG_INTERVAL_SECONDS: Final = 10.0  # an engine that blocks at every token must not fill the disk
STANDSTILL_SECONDS: Final = 0.5  # the thread itself woke up this late: perhaps the whole process stood still

_STDLIB: Final = str(Path(os.__file__).parent)
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_ROOTS: Final = tuple(f"{folder}/" for folder in dynamo.__path__)
_MACHINERY: Final = tuple(f"{root}{room}/" for root in _ROOTS for room in ("runtime", "worker", "contract"))
_LOOP_FUNCTIONS: Final = frozenset({"_run", "_run_once", "run", "run_forever", "run_until_complete"})
_LOOP_FILES: Final = ("asyncio/runners.py", "asyncio/base_events.py", "asyncio/events.py")


AnswerProbes = Callable[[Callable[[], bool], float], None]


class LoopBlock(Struct, frozen=True):
    """One time during which the event loop ran nothing but one callback."""

    seconds: float
    place: str | None  # "engine.py:43 (generate)"; None: it was over before the stack could be read

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, at {self.place or 'a place that was not seen'}"


def place_of(frame: FrameType | None) -> tuple[str, bool] | None:
    """Name the innermost frame of the running callback that is not library code; None: the loop runs no callback.

    Installed packages come second, as an engine may be one, and the standard library last. The flag is False when the
    callback belongs to the worker's own machinery, so that the report does not name an engine.
    """
    installed: FrameType | None = None
    other: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_LOOP_FILES) and frame.f_code.co_name in _LOOP_FUNCTIONS:
            break
        if file.startswith(_MACHINERY):
            other = other or frame
        elif file.startswith(_ROOTS):
            return _name_frame(frame), True
        elif any(folder in file for folder in _PACKAGES):
            installed = installed or frame
        elif file.startswith((_STDLIB, "<")):
            other = other or (None if file.endswith("/selectors.py") else frame)  # a loop that waits runs nothing
        else:
            return _name_frame(frame), True
        frame = frame.f_back
    if installed is not None:
        return _name_frame(installed), True
    return None if other is None else (_name_frame(other), False)


def _name_frame(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


BLOCKS: Final = Family(
    "dynamo_work_handler_event_loop_blocks_total",
    "counter",
    "How often one callback blocked the event loop for longer than `DYN_LOOP_BLOCK_THRESHOLD_SECS`",
)
BLOCKED_SECONDS: Final = Family(
    "dynamo_work_handler_event_loop_blocked_seconds_total", "counter", "Seconds of these blocks of the event loop"
)
FAMILIES: Final = (BLOCKS, BLOCKED_SECONDS)


class LoopBlockMetrics:
    """What the watchdog counts. One per process."""

    __slots__ = ("blocked_seconds", "blocks")

    def __init__(self, registry: MetricsRegistry) -> None:
        self.blocks, self.blocked_seconds = BLOCKS.counter(registry), BLOCKED_SECONDS.counter(registry)


class _Tick(NamedTuple):
    """When the loop has stamped the time, and the time of the processor that the process had used by then."""

    at: float
    cpu: float


class _BlockReports:
    """Counts and logs the blocks of one loop that are over."""

    def __init__(self, registry: MetricsRegistry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self.log = LogLimit(clock)
        self.last: LoopBlock | None = None

    def begin(self) -> LoopBlockMetrics:
        """Open the series."""
        return LoopBlockMetrics(self._registry)

    def ended(self, block: LoopBlock) -> None:
        self.last = block
        metrics = self.begin()
        metrics.blocks.inc()
        metrics.blocked_seconds.inc(block.seconds)
        self.log.warning("the event loop runs again; it was blocked for %s", block)


class LoopWatchdog:
    """Watches the running event loop from `start` to `close`, or to the end of the loop. Reading `trouble` and `last_block` is safe in any thread."""

    def __init__(
        self,
        metrics: MetricsRegistry,
        threshold_seconds: float,
        *,
        answer_probes: AnswerProbes = lambda is_blocked, seconds: time.sleep(seconds),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threshold_seconds`: a callback that runs for longer blocks the loop; 0: nothing is watched.

        `answer_probes(is_blocked, seconds)` is called by the watching thread while a block lasts, and returns after about
        that time.
        """
        self._threshold_seconds = threshold_seconds
        self._answer_probes = answer_probes
        self._clock = clock
        self._ticked = _Tick(0.0, 0.0)
        self._seen: tuple[float, str] | None = None  # the tick that a block followed, and where the block stands
        self._reports = _BlockReports(metrics, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def last_block(self) -> LoopBlock | None:
        """The last block that is over; None: there was none."""
        return self._reports.last

    def start(self) -> None:
        """Watch the running loop; idempotent."""
        if self._thread is not None or self._threshold_seconds <= 0:
            return
        self._reports.begin()  # now: a process that only calls others has no such series
        self._ticked = _Tick(self._clock(), time.process_time())
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, threading.get_ident()), name="loop watchdog", daemon=True
        )
        self._thread.start()
        self._tick_later(loop)

    def close(self) -> None:
        """Stop watching; idempotent. Returns without waiting for the thread, which ends within a moment."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def trouble(self) -> str | None:
        """Return why the process cannot serve now; None while its event loop runs."""
        seen, ticked_at = self._seen, self._ticked.at
        if seen is None or seen[0] != ticked_at:
            return None
        return f"the event loop has been blocked for {LoopBlock(self._clock() - ticked_at, seen[1])}"

    def describe_last_block(self) -> dict[str, object] | None:
        """Describe the last block for `/health`; None: there was none."""
        block = self._reports.last
        return None if block is None else {"seconds": round(block.seconds, 3), "place": block.place}

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _tick_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(TICK_SECONDS, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now, cpu, seen = self._clock(), time.process_time(), self._seen
        ticked_at, ticked_cpu = self._ticked
        if seen is not None and seen[0] == ticked_at:
            self._reports.ended(LoopBlock(now - ticked_at, seen[1]))
        elif now - ticked_at >= self._threshold_seconds and cpu - ticked_cpu > (now - ticked_at) / 2:
            # It held the interpreter's lock: the thread could not check.
            self._reports.ended(LoopBlock(now - ticked_at, None))
        self._ticked = _Tick(now, cpu)
        self._tick_later(loop)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        wait_seconds, threshold = self._threshold_seconds, self._threshold_seconds
        while True:
            due, cpu = self._clock() + wait_seconds, time.process_time()
            if self._stop.wait(wait_seconds) or loop.is_closed():
                return
            now, ticked_at = self._clock(), self._ticked.at
            if now - due > STANDSTILL_SECONDS and time.process_time() - cpu < (now - due) / 2:
                # A suspended machine, or one without a processor to spare: the loop could not have run, either.
                self._ticked = self._ticked._replace(at=now)
            elif now - ticked_at >= threshold:
                found = place_of(sys._current_frames().get(loop_thread))
                if found is not None and self._ticked.at == ticked_at:  # else it ended while the stack was being read
                    self._stay_with_block(loop, ticked_at, *found)
            wait_seconds = max(LOOK_SECONDS, self._ticked.at + threshold - self._clock())

    def _stay_with_block(self, loop: asyncio.AbstractEventLoop, ticked_at: float, place: str, is_engine: bool) -> None:
        """Report a block, and answer probes until it is over."""
        self._seen = (ticked_at, place)
        subject = "the engine" if is_engine else "a callback"
        block = LoopBlock(self._clock() - ticked_at, place)
        self._reports.log.warning(
            "%s blocked the event loop for %s; no request of this process goes on", subject, block
        )
        while self._ticked.at == ticked_at and not self._stop.is_set() and not loop.is_closed():
            self._answer_probes(lambda: self._ticked.at == ticked_at, LOOK_SECONDS)


class LogLimit:
    """Lets two lines of one block through per interval, and counts the others. Both threads use it; a lost count is no harm."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines = 0
        self._until = float("-inf")
        self._left_out = 0

    def warning(self, text: str, *arguments: object) -> None:
        now = self._clock()
        if now >= self._until:
            self._until, self._lines = now + LOG_INTERVAL_SECONDS, 0
        if self._lines >= 2:
            self._left_out += 1
            return
        self._lines += 1
        left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more lines of this kind were left out)" if left_out else ""
        logger.warning(text + more, *arguments)
