"""The guard of child processes is a process itself, and may be killed: then another one takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from support.processes import until

PROGRAM = """
import subprocess, sys
from dynamo.runtime.base import process_guard
process_guard.guard_this_process()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
for _ in sys.stdin:
    print(process_guard._guard.pid, flush=True)
"""


def is_alive(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat", "rb") as stat:
            return stat.read().rsplit(b")", 1)[1].split()[0] not in b"ZX"
    except OSError:
        return False


def started() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


async def test_a_guard_that_was_killed_is_replaced_and_ends_the_children_of_before() -> None:
    parent = started()
    stdin, stdout = parent.stdin, parent.stdout
    assert stdin is not None
    assert stdout is not None

    def answer() -> int:
        stdin.write("\n")
        stdin.flush()
        return int(stdout.readline())

    child = int(stdout.readline())
    try:
        first = answer()
        os.kill(first, signal.SIGKILL)
        await until(lambda: answer() != first)
        second = answer()
        assert (is_alive(second), is_alive(child)) == (True, True)
        parent.kill()
        await until(lambda: not is_alive(child))
        await until(lambda: not is_alive(second))
    finally:
        parent.kill()
        parent.communicate()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
