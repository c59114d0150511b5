"""Run a program and count what lives in it, on request: how the soak looks for growth without touching the program.

    python probe.py COUNTS.json -m dynamo.frontend --http-port 8000
    python probe.py COUNTS.json engine.py --model DIR

On SIGUSR2 the process collects garbage and writes `{"tasks": N, "dicts": N, "objects": N, "descriptors": N, "types": {...}}`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path


def counts() -> dict[str, object]:
    """What is alive now, by kind."""
    gc.collect()
    alive = Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects())
    return {
        "tasks": sum(alive[name] for name in ("_asyncio.Task", "asyncio.tasks.Task")),
        "timers": alive["asyncio.events.TimerHandle"],
        "dicts": alive["builtins.dict"],
        "objects": alive.total(),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists them
        "types": dict(alive.most_common(400)),
    }


def main() -> None:
    target = Path(sys.argv[1])

    def write(_number: int, _frame: object) -> None:
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(counts()))
        partial.rename(target)  # a reader sees all of it or nothing

    signal.signal(signal.SIGUSR2, write)
    if sys.argv[2] == "-m":
        sys.argv = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[2:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    assert asyncio.Task is not None  # imported so that the names counted above are the ones in use
    main()
