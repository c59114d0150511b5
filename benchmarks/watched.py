"""Run a program and measure every piece of work on its event loop, on request.

    python watched.py REPORT.json -m dynamo.frontend --http-port 8000

On SIGUSR2 the process writes what has run since the last report: `{"pieces", "seconds", "over", "longest": [[seconds, name,
seconds of the collector], ...], "collections": [[number, longest seconds] of each generation]}`, by the CPU clock of the thread. It runs on the plain event loop of asyncio, as uvloop's cannot be measured from within.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import json
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

KEPT: Final = 12  # of the longest pieces
LONG_SECONDS: Final = 0.005


class Pieces:
    """What has run on the event loop of the main thread since the last report."""

    def __init__(self) -> None:
        self._run = asyncio.Handle._run
        self._main = threading.get_ident()
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.count, self.seconds, self.over = 0, 0.0, 0
        self.longest: list[tuple[float, int, str, float]] = []
        self._collecting = 0.0
        self.collections = [[0, 0.0], [0, 0.0], [0, 0.0]]

    def run(self, handle: Any) -> None:
        """Run a handle of the event loop, in place of its own method."""
        if threading.get_ident() != self._main:  # the loop of a store's thread
            self._run(handle)
            return
        self._collecting, began = 0.0, time.thread_time()
        self._run(handle)
        took = time.thread_time() - began
        self.count += 1
        self.seconds += took
        self.over += took > LONG_SECONDS
        if took > 0.001:
            heapq.heappush(self.longest, (took, self.count, _name_of(handle), self._collecting))
            if len(self.longest) > KEPT:
                heapq.heappop(self.longest)

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Note how long the collector takes in a piece of work."""
        if phase == "start":
            self._began = time.thread_time()
        elif threading.get_ident() == self._main:
            took = time.thread_time() - self._began
            self._collecting += took
            generation = self.collections[info["generation"]]
            generation[0] += 1
            generation[1] = max(generation[1], took)

    def report(self) -> dict[str, object]:
        """Return what has run, and begin anew."""
        made = {
            "pieces": self.count,
            "seconds": self.seconds,
            "over": self.over,
            "collections": self.collections,
            "longest": [(took, name, part) for took, _, name, part in sorted(self.longest, reverse=True)],
        }
        self.clear()
        return made


def _name_of(handle: Any) -> str:
    """Return what a piece of work is of: its task, or else its function."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return task.get_name()
    inner = getattr(callback, "func", callback)
    return getattr(inner, "__qualname__", "") or repr(callback)[:80]


def main() -> None:
    """Run the program of the command line."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    pieces = Pieces()
    asyncio.Handle._run = lambda handle: pieces.run(handle)  # type: ignore
    gc.callbacks.append(pieces.collected)
    target = Path(sys.argv[1])

    def write(_number: int, _frame: object) -> None:
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(pieces.report()))
        partial.rename(target)  # a reader sees all of it or nothing

    signal.signal(signal.SIGUSR2, write)
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
