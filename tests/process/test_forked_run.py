"""The tests in forked processes (tests/support/forked_run.py): each test is reported once, whatever ends its process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.forked_run import ForkedRun

TESTS = """
import os, signal, time, pytest

NUMBER = iter(range(100))

@pytest.fixture(scope="module")
def number():
    return next(NUMBER)

@pytest.mark.parametrize("n", range(40))
def test_passes(n, number, tmp_path):
    assert number == 0 and tmp_path.exists()

def test_fails():
    print("words of the test")
    assert 1 == 2

def test_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.timeout(0.2)
def test_takes_too_long():
    time.sleep(60)

@pytest.fixture
def broken():
    raise ValueError("of a fixture")

def test_has_a_broken_fixture(broken):
    pass

@pytest.mark.skip(reason="on purpose")
def test_is_skipped():
    pass
"""
LEAVES = """
import gc

gc.disable()

class Left:
    def __init__(self):
        self.itself = self

    def __del__(self):
        raise ValueError("left open")

def test_leaves():
    Left()

def test_more():
    pass
"""
CUT = """
import pathlib, time, pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture
def server():
    yield
    (HERE / "closed").touch()

def test_waits(server):
    (HERE / "begun").touch()
    time.sleep(100)

@pytest.mark.parametrize("n", range(6))  # one of them may wait behind the test above, in its process
def test_fails(n):
    while not (HERE / "begun").exists():
        time.sleep(0.01)
    assert False
"""
ENDS = """
import atexit, pathlib

def note(text):
    with open(pathlib.Path(__file__).parent / "ended", "a") as file:
        file.write(text + "\\n")

atexit.register(note, "collected")

def test_registers():
    atexit.register(note, "tested")

def test_more():
    pass
"""
CONFTEST = """
from support.forked_run import ForkedRun

def pytest_configure(config):
    config.pluginmanager.register(ForkedRun(3))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what is in a folder with pytest, in three forked processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(sys.modules[ForkedRun.__module__].__file__ or '').parent.parent}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:xdist", "-p", "no:schemathesis", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_test_is_reported_once_also_when_its_process_ends(tmp_path: Path) -> None:
    (tmp_path / "test_all_ends.py").write_text(TESTS)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "3 failed, 40 passed, 1 skipped, 1 error" in done.stdout
    for line in ("words of the test", "exit code -9", "Timeout (>0.2s)", "ValueError: of a fixture", "on purpose"):
        assert line in done.stdout


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_all_ends.py").write_text(TESTS.replace("number == 0", "number == 1"))
    done = run(tmp_path, "-x")
    assert done.returncode == 1
    assert re.search(r"stopping after [12] failures", done.stdout)  # another process may have failed in the same moment


def test_a_test_that_is_cut_by_the_first_failure_is_taken_down(tmp_path: Path) -> None:
    (tmp_path / "test_cut.py").write_text(CUT)
    done = run(tmp_path, "-x")
    assert done.returncode == 1
    assert (tmp_path / "closed").exists()


def test_what_a_test_left_for_the_end_of_its_process_runs_once(tmp_path: Path) -> None:
    (tmp_path / "test_ends.py").write_text(ENDS)
    assert run(tmp_path).returncode == 0
    assert sorted((tmp_path / "ended").read_text().split()) == ["collected", "tested"]


def test_what_complains_at_the_end_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    done = run(tmp_path)
    assert done.returncode != 0
    assert "left open" in done.stdout + done.stderr
