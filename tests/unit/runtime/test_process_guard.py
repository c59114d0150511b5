"""What the guard of a process takes for that process's descendants and files, in tables of processes made up here."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo.runtime.base import process_guard
from dynamo.runtime.base.process_guard import HELPER

PARENT, CHILD, GRANDCHILD, OTHER = 4_000_001, 4_000_002, 4_000_003, 4_000_004  # beyond what a kernel gives out

Table = dict[int, tuple[int, str]]


class Kernel:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: Table = {PARENT: (1, "t1"), CHILD: (PARENT, "t2"), GRANDCHILD: (CHILD, "t3")}
        self.killed: list[int] = []
        monkeypatch.setattr(process_guard, "_table", lambda: dict(self.table))
        monkeypatch.setattr(process_guard, "_kill", self.kill)

    def kill(self, number: int) -> None:
        self.killed.append(number)
        del self.table[number]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def guard(temporary: str = "/nowhere") -> process_guard._Guard:
    return process_guard._Guard(PARENT, "mark", "0", temporary)


def test_a_look_tells_whether_something_has_changed(kernel: Kernel) -> None:
    looking = guard()
    assert [looking.look(), looking.look()] == [True, False]
    del kernel.table[GRANDCHILD]
    assert [looking.look(), looking.look()] == [True, False]


def test_what_is_left_is_killed_and_nothing_that_has_a_number_of_the_dead(kernel: Kernel) -> None:
    looking = guard()
    looking.look()
    kernel.table = {
        PARENT: (1, "t9"),  # another process has the number of the parent by now,
        OTHER: (PARENT, "t9"),  # and a child;
        CHILD: (1, "t9"),  # and yet another has that of a child
        GRANDCHILD: (1, "t3"),
    }
    looking.sweep()
    assert kernel.killed == [GRANDCHILD]


# -- what they leave behind -------------------------------------------------------------------------------------------


@pytest.fixture
def shared(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, set[str]]:
    """Which process has mapped which shared memory; the memory is in files below `tmp_path`."""
    maps: dict[int, set[str]] = {}
    monkeypatch.setattr(process_guard, "SHARED", tmp_path)
    monkeypatch.setattr(process_guard, "_mapped", lambda number: maps.get(number, set()) & set(os.listdir(tmp_path)))
    for name in ("psm_parent", "psm_child", "psm_other", "psm_both", "weights.gguf"):
        (tmp_path / name).touch()
    maps[PARENT] = {"psm_parent"}
    maps[CHILD] = {"psm_child", "psm_both", "weights.gguf"}
    maps[OTHER] = {"psm_other", "psm_both"}
    kernel.table[OTHER] = (1, "t4")
    return maps


def test_shared_memory_goes_that_only_the_dead_had_mapped(
    kernel: Kernel, shared: dict[int, set[str]], tmp_path: Path
) -> None:
    looking = guard()
    looking.look()
    (tmp_path / "psm_late").touch()  # made after the last look
    shared[GRANDCHILD] = {"psm_late"}
    del kernel.table[PARENT]
    looking.sweep()
    assert sorted(looking.remove_files()) == [str(tmp_path / f"psm_{name}") for name in ("child", "late", "parent")]
    assert sorted(os.listdir(tmp_path)) == ["psm_both", "psm_other", "weights.gguf"]


def test_shared_memory_that_was_taken_down_in_order_is_forgotten(shared: dict[int, set[str]], tmp_path: Path) -> None:
    looking = guard()
    looking.look()
    (tmp_path / "psm_child").unlink()
    looking.look()
    (tmp_path / "psm_child").touch()  # the same name, of somebody else
    shared[CHILD] = set()
    looking.look()
    looking.sweep()
    assert str(tmp_path / "psm_child") not in looking.remove_files()


def test_shared_memory_that_was_written_down_goes_with_processes_that_died_unseen(
    kernel: Kernel, shared: dict[int, set[str]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    private = temporary / "dynamo-sglang-mark-abc"
    private.mkdir()
    process_guard.note_shared_memory(private, [CHILD])
    noted = (private / process_guard.SHARED_LIST).read_text()
    assert noted.split() == ["psm_both", "psm_child"]
    (private / process_guard.SHARED_LIST).write_text(
        f"{noted}\nweights.gguf\n../secret\n"
    )  # never more than known makers
    kernel.table = {OTHER: (1, "t4")}  # the rest ended in one moment
    looking = guard(str(temporary))
    looking.sweep()
    assert looking.remove_files() == [str(private), str(tmp_path / "psm_child")]
    assert sorted(os.listdir(tmp_path)) == ["psm_both", "psm_other", "psm_parent", "weights.gguf"]


def test_an_engines_end_removes_what_its_processes_shared_with_this_one_only(
    kernel: Kernel, shared: dict[int, set[str]], tmp_path: Path
) -> None:
    me = os.getpid()
    kernel.table |= {me: (1, "t0"), CHILD: (me, "t2")}
    shared[me] = {"psm_child"}
    mine = process_guard.descendants(me)
    held = process_guard.shared_memory_of(mine)
    process_guard.end_processes(mine, held)
    assert kernel.killed == [CHILD, GRANDCHILD]
    assert sorted(os.listdir(tmp_path)) == ["psm_both", "psm_other", "psm_parent", "weights.gguf"]


@pytest.mark.skipif(not process_guard.SHARED.is_dir(), reason="shared memory has no directory here")
def test_what_a_process_has_mapped_is_read_from_the_kernel() -> None:
    memory = SharedMemory(create=True, size=4096)
    try:
        assert memory.name in process_guard._mapped(os.getpid())
    finally:
        memory.close()
        memory.unlink()
    assert memory.name not in process_guard._mapped(os.getpid())


def test_private_directories_of_the_parent_go_and_no_others(kernel: Kernel, tmp_path: Path) -> None:
    mine, other = tmp_path / "dynamo-vllm-mark-abc", tmp_path / "dynamo-vllm-kram-abc"
    for directory in (mine, other):
        directory.mkdir()
        (directory / "file").touch()
    assert guard(str(tmp_path)).remove_files() == [str(mine)]
    assert os.listdir(tmp_path) == [other.name]


def test_temporary_files_are_made_in_a_directory_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with process_guard.temporary_files_in(tmp_path):
        with tempfile.NamedTemporaryFile() as file:
            assert Path(file.name).parent == tmp_path
        assert os.environ["TMPDIR"] == str(tmp_path)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(before[0])  # for the next process as well
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before


def test_a_helper_gets_its_moment_from_the_end_of_the_others_on(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the others take to end: the helper removes their shared memory only then."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(process_guard, "_read", lambda number, _name: HELPER if number == CHILD else b"engine")
    looking = guard()
    looking.look()
    monkeypatch.setattr(process_guard, "_kill", lambda number: clock.killed.append((number, clock.now)))
    clock.at(5.0, lambda: kernel.table.pop(GRANDCHILD))
    clock.at(5.0 + process_guard.HELPER_SECONDS / 2, lambda: kernel.table.pop(CHILD))
    looking.sweep()
    assert {number for number, _ in clock.killed} == {GRANDCHILD}
    assert max(when for _, when in clock.killed) > process_guard.HELPER_SECONDS


class Clock:
    """Time that passes in `sleep` alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.killed: list[tuple[int, float]] = []
        self._plan: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(process_guard, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def at(self, when: float, act: Callable[[], object]) -> None:
        self._plan.append((when, act))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self._plan and self._plan[0][0] <= self.now:
            self._plan.pop(0)[1]()


@pytest.mark.parametrize("depth", [1, 20])
def test_a_socket_in_a_private_directory_has_a_path_that_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    long = tmp_path.joinpath(*["a-long-name"] * depth)
    long.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = process_guard.private_directory("sglang")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "inproc-kv-events-15"))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(directory)


def test_a_short_folder_of_temporary_files_is_used_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert process_guard.private_directory("llama").parent == Path(short)


def test_where_no_folder_is_short_enough_the_error_names_tmpdir_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    monkeypatch.setattr(process_guard, "SHORT", ())
    with pytest.raises(
        OSError, match=r"TMPDIR is too long .* has \d+ bytes, and may have 47\. Set TMPDIR to a shorter"
    ):
        process_guard.private_directory("llama")
