"""An engine with child processes, for tests over real processes: `python tests/support/parent_engine.py DIR`.

It starts four processes: a child, a child in a session of its own, one that has lost its own parent, and one that was
forked, which does not notice that the engine ends. Their numbers are in DIR/children. The engine is dead when the first
one is.

That first one also makes shared memory of which nothing but its own mapping knows. The path of it, and of a private
directory with a file and a socket in it, are in DIR/files. Where DIR/notes exists the engine writes down that memory, as
engines do whose processes may die before the guard has looked.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, LLMEngine
from dynamo.runtime.base.process_guard import note_shared_memory, private_directory
from dynamo.worker.run import run

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
CORE = """
import mmap, os, socket, sys, time
path, bound = f"/dev/shm/psm_test_{os.getpid()}", socket.socket(socket.AF_UNIX)
with open(path, "w+b") as file:
    file.truncate(1 << 20)
    held = mmap.mmap(file.fileno(), 1 << 20)
bound.bind(sys.argv[1] + "/core.sock")
print(path, flush=True)
time.sleep(600)
"""
ORPHAN = "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid); os._exit(0)"
TEARDOWN_SECONDS = 600


class SlowTeardown:
    """What a large library is to the end of a process."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(TEARDOWN_SECONDS)


class ParentEngine(LLMEngine):
    has_child_processes = True
    skips_teardown = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.core: subprocess.Popen[bytes] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        directory = Path((argv or sys.argv[1:])[0])
        return cls(directory), WorkerConfig(namespace="ns", discovery_backend="file")

    async def start(self, worker_id: int) -> EngineConfig:
        self.start_processes()
        return EngineConfig(model="m")

    def start_processes(self) -> None:
        private = private_directory("parent")
        (private / "file").write_text("of the engine")
        self.core = subprocess.Popen([sys.executable, "-S", "-c", CORE, str(private)], stdout=subprocess.PIPE)
        assert self.core.stdout is not None
        shared = self.core.stdout.readline().decode().strip()
        (self.directory / "files").write_text(f"{private}\n{shared}")
        if (self.directory / "notes").exists():
            note_shared_memory(private, [self.core.pid])
        apart = subprocess.Popen(SLEEP, start_new_session=True)
        orphan = subprocess.run([sys.executable, "-S", "-c", ORPHAN, *SLEEP], stdout=subprocess.PIPE, check=True)
        forked = os.fork()
        if forked == 0:
            time.sleep(600)
            os._exit(0)
        (self.directory / "children").write_text(f"{self.core.pid} {apart.pid} {int(orphan.stdout)} {forked}")
        sys.modules["slow_teardown"] = SlowTeardown()  # type: ignore[assignment]
        atexit.register((self.directory / "atexit").touch)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        yield {"token_ids": [1], "index": 0, "finish_reason": "stop"}

    async def wait_dead(self) -> str:
        assert self.core is not None
        while self.core.poll() is None:
            await asyncio.sleep(0.02)
        return "its core is gone"

    async def cleanup(self) -> None:
        """Leaves its processes behind, on purpose."""


if __name__ == "__main__":
    run(ParentEngine)
