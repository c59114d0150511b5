"""Engines with child processes: nothing is left behind by a killed worker, and how a worker ends when its engine is dead."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.cases import each_case
from support.patience import PATIENCE_SECONDS
from support.processes import Process

ENGINE = Path(__file__).parents[2] / "support" / "parent_engine.py"
SERVING = "Serving m on"


def lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def wait(until: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + PATIENCE_SECONDS, f"waited in vain for {what}"
        time.sleep(0.02)
    return time.monotonic() - began


class Worker:
    """A worker that serves, and the processes of its engine."""

    def __init__(self, home: Path, *, notes_memory: bool = False) -> None:
        home.mkdir()
        if notes_memory:
            (home / "notes").touch()
        self.home, self.store = home, home / "store"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        own = {"DYN_FILE_KV": str(self.store), "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
        argv = [sys.executable, str(ENGINE), str(home)]
        self.process = Process(home.name, argv, environment | own, home / "log")
        self.process.wait_log(SERVING)
        wait(lambda: bool(self.records()), "the instance")
        self.children = [int(number) for number in (home / "children").read_text().split()]
        assert all(lives(number) for number in self.children)
        self.files = [Path(line) for line in (home / "files").read_text().splitlines()]
        assert all(path.exists() for path in self.files)

    def records(self) -> list[Path]:
        return [path for path in self.store.glob("v1/instances/*") if not path.name.startswith(".")]

    def wait_no_child(self) -> None:
        wait(lambda: not any(lives(number) for number in self.children), f"the end of {self.children}")

    def wait_no_file(self) -> None:
        wait(lambda: not any(path.exists() for path in self.files), f"the end of {self.files}")

    def close(self) -> None:
        self.process.close()
        for number in self.children:
            if lives(number):
                os.kill(number, signal.SIGKILL)


def kill_worker(worker: Worker) -> int:
    worker.process.signal(signal.SIGKILL)
    return -signal.SIGKILL


def terminate_worker(worker: Worker) -> int:
    worker.process.signal(signal.SIGTERM)
    return 0


def kill_core(worker: Worker) -> int:
    os.kill(worker.children[0], signal.SIGKILL)
    return 1


@each_case("end", [kill_worker, terminate_worker, kill_core], ids=lambda end: end.__name__)
def test_no_process_and_no_file_outlives_its_worker(tmp_path: Path, end: Callable[[Worker], int]) -> None:
    # The core that is killed may die before the guard has looked for the first time.
    worker = Worker(tmp_path / end.__name__, notes_memory=end is kill_core)
    try:
        status = end(worker)
        assert worker.process.exit_code() == status
        worker.wait_no_child()
        worker.wait_no_file()
        if status >= 0:  # it ended by itself: without the teardown, which would take minutes, and with all else done
            assert worker.records() == []
            assert (worker.home / "atexit").exists()
        if end is kill_core:
            assert "EngineShutdown: the engine died: its core is gone" in worker.process.log
        assert "killed what it left behind" in wait_for_report(worker)
    finally:
        worker.close()


def wait_for_report(worker: Worker) -> str:
    wait(lambda: "left behind" in worker.process.log, "the guard's report")
    return worker.process.log
