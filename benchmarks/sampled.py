"""Run a module, and write down where its processor time goes: python sampled.py FILE MODULE [ARGUMENT ...].

Each few milliseconds of processor time the stack is noted, so that the program runs at its own speed and each function keeps its
caller, which cProfile loses for callbacks and coroutines. FILE gets a JSON list of [stack, samples]; a stack is a list of
[path, function], the innermost first. Time in C counts for the Python function that runs next or called it.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

SECONDS: Final = 0.001  # between two samples; the kernel makes it one of its ticks where these are longer


def main() -> None:
    file, module = sys.argv[1:3]
    found = Counter[tuple[tuple[str, str], ...]]()

    def note(_: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        found[tuple(stack)] += 1

    signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)
    sys.argv[:] = sys.argv[2:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        Path(file).write_text(json.dumps(list(found.items())))


if __name__ == "__main__":
    main()
