"""Ends the processes that this process started, and removes their temporary files, once this process is gone, however it
ended.

A process that is killed cannot end its children. So a second, small process, the guard, watches it: this file, run as a
program, which imports the standard library only. It notes the descendants of its parent while the parent lives. When
the parent is gone it kills those that are left, whatever process group or session they are in. A descendant that was
started since the last scan is found by what it inherited: a mark in the environment, or the descriptor of a pipe where it
was forked and runs no other program.

The helper processes with which Python's `multiprocessing` removes shared memory get a moment to do so. What is left then
the guard removes: directories that came from `private_directory`, and shared memory of known makers that one of the
killed processes had mapped and no living one has.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

MARK: Final = "DYNAMO_GUARD_MARK"  # in the environment of this process's children: their start was guarded
PROC: Final = Path("/proc")
LOOK_SECONDS: Final = 2.0  # between two scans; what was started since is found by what it inherited
LONGEST_LOOK_SECONDS: Final = 60.0  # each scan that finds nothing new doubles the time to the next one, up to this
LOOK_SECONDS_WITHOUT_PROC: Final = 3.0  # each scan is a `ps` then
SWEEP_SECONDS: Final = 10.0  # a process that is stuck in the kernel cannot be killed; the guard does not wait longer
HELPER_SECONDS: Final = 2.0  # for `multiprocessing.resource_tracker`, once all others have ended
HELPER: Final = b"multiprocessing.resource_tracker"

Started = dict[int, str]
"""Processes by number, each with the time of its start: numbers are used again."""

RESTART_SECONDS: Final = 1.0  # at least between two starts: a guard that cannot live is not started in a tight loop

SHARED: Final = Path("/dev/shm")
SHARED_NAMES: Final = ("psm_", "sem.mp-", "torch_", "nccl-", "sgl_shm_", "sglang_loads_")
"""How shared memory begins that Python, torch, NCCL and SGLang make; anything else is left alone."""

SHARED_LIST: Final = "shared-memory"  # file of a private directory: names, a line each

TEMPORARY: Final = "TMPDIR"
SHORT: Final = ("/tmp", "/var/tmp", "/dev/shm")
SOCKET_PATH: Final = 103  # bytes that every system takes of a Unix socket's path; Linux takes 107
PRIVATE_BYTES: Final = 56  # of them behind the folder of temporary files: a private directory, and a socket's name
COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"


class _Mark(NamedTuple):
    """What all guards of a process search for."""

    process: int
    text: str  # in the environment of children and in the names of private directories
    temporary: str  # where these directories are


_guard: subprocess.Popen[bytes] | None = None
_mark: _Mark | None = None
_keeper: threading.Thread | None = None
_pipe: int | None = None  # never used; a process that holds it was forked by this one


def guard_this_process() -> None:
    """Start the guard of this process, and see to it that there is one: a guard that ends is started again. Idempotent.

    Raises OSError.
    """
    global _keeper, _mark, _pipe
    if _mark is None or _mark.process != os.getpid():  # the first call, or one in a process that was forked
        _mark, _keeper = _Mark(os.getpid(), secrets.token_hex(6), _temporary()), None
    elif _guard is not None and _guard.poll() is None:
        return
    if _pipe is None:
        _pipe, other_end = os.pipe()
        os.close(other_end)
    _start_guard(_mark, _pipe)
    if _keeper is None or not _keeper.is_alive():
        # A daemon: it waits for a process that outlives this one.
        _keeper = threading.Thread(target=_keep, args=(_mark, _pipe), name="process guard", daemon=True)
        _keeper.start()


def _temporary() -> str:
    """Return where private directories are: where the path of a socket is short enough. Raises OSError where it is nowhere."""
    chosen = tempfile.gettempdir()
    for folder in (chosen, *SHORT):
        if len(os.fsencode(folder)) + PRIVATE_BYTES <= SOCKET_PATH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(
        f"{TEMPORARY} is too long for the Unix sockets in it: {chosen} has {len(os.fsencode(chosen))} bytes, and may have "
        f"{SOCKET_PATH - PRIVATE_BYTES}. Set {TEMPORARY} to a shorter folder"
    )


def _start_guard(mark: _Mark, pipe: int) -> None:
    global _guard
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    _guard = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", __file__),
            *(str(mark.process), mark.text, str(os.fstat(pipe).st_ino), mark.temporary),
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it outlives what ends the group of its parent
    )
    os.environ[MARK] = mark.text
    logger.debug("process %d ends the children of this process when this process is gone", _guard.pid)


def _keep(mark: _Mark, pipe: int) -> None:
    """Start another guard whenever the guard of this process has ended. Runs in a thread for as long as the process lives."""
    while True:
        began, guard = time.monotonic(), _guard
        assert guard is not None
        status = guard.wait()
        if os.getpid() != mark.process:
            return
        logger.warning(
            "the guard of child processes (process %d) ended with status %d; starting another", guard.pid, status
        )
        time.sleep(max(0.0, began + RESTART_SECONDS - time.monotonic()))
        while True:
            try:
                _start_guard(mark, pipe)
                break
            except OSError as error:
                logger.error(
                    "the guard of child processes cannot be started, next attempt in %g s: %s", RESTART_SECONDS, error
                )
                time.sleep(RESTART_SECONDS)


def descendants(of: int) -> Started:
    """Return the living descendants of a process, but for the guard and the helpers of `multiprocessing`, which end by
    themselves.
    """
    found = {
        number: begun for number, begun in _below([of], _table()).items() if HELPER not in _read(number, "cmdline")
    }
    if _guard is not None:
        found.pop(_guard.pid, None)
    return found


def private_directory(name: str) -> Path:
    """Make a directory for temporary files and sockets; `name` becomes part of its own. Raises OSError.

    The caller removes it. Once this process is gone its guard removes it, if there is a guard.
    """
    is_guarded = _mark is not None and _mark.process == os.getpid()
    mark, parent = (_mark.text, _mark.temporary) if _mark is not None and is_guarded else ("unguarded", _temporary())
    return Path(tempfile.mkdtemp(prefix=f"dynamo-{name}-{mark}-", dir=parent))


@contextmanager
def temporary_files_in(directory: Path) -> Iterator[None]:
    """Make temporary files in a directory, in this process and in the processes that it starts in the block.

    What torch has compiled stays where the next process finds it.
    """
    before, variable = tempfile.tempdir, os.environ.get(TEMPORARY)
    os.environ.setdefault(COMPILED, str(Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"))
    tempfile.tempdir = os.environ[TEMPORARY] = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            del os.environ[TEMPORARY]
        else:
            os.environ[TEMPORARY] = variable


def _user() -> str:
    """Return the name of the user as torch has it in the name of its directory; the number where there is no name."""
    with suppress(KeyError, OSError):
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return str(os.getuid())


def shared_memory_of(processes: Iterable[int]) -> set[str]:
    """Return the names of shared memory of known makers that one of the processes has mapped."""
    there = _shared_names()
    return {name for number in processes for name in there & _mapped(number)} if there else set()


def note_shared_memory(directory: Path, processes: Iterable[int]) -> None:
    """Write down in a private directory which shared memory the processes have mapped: the guard removes that, too.

    The guard scans by itself, and finds what was made since its last scan while the processes live. Some engines'
    processes die at the same moment as this one.
    """
    (directory / SHARED_LIST).write_text("\n".join(sorted(shared_memory_of(processes))))


def end_processes(processes: Started, shared: Iterable[str] = ()) -> None:
    """Kill the descendants of this process that are left of some, and remove their shared memory. Blocks for seconds at most.

    `shared`: what they had mapped, before anything ended them. What another living process has mapped stays.
    """
    until = time.monotonic() + HELPER_SECONDS
    left = dict(processes)
    while left and time.monotonic() < until:
        living = descendants(os.getpid())
        left = {number: begun for number, begun in left.items() if living.get(number) == begun}
        for number in left:
            _kill(number)
        if left:
            time.sleep(0.02)
    _remove_shared(shared, but_for=os.getpid())


# -- the table of processes -------------------------------------------------------------------------------------------


def _table() -> dict[int, tuple[int, str]]:
    """Return every process that is not a zombie: its number -> (its parent's number, the time of its start)."""
    if not (PROC / "self" / "stat").exists():
        return _table_of_ps()
    found = {}
    for number in _numbers(os.listdir(PROC)):
        entry = _stat(number)
        if entry is not None:
            found[number] = entry
    return found


def _stat(number: int) -> tuple[int, str] | None:
    """Return the parent and the time of the start of a process; None when it is gone or a zombie."""
    try:
        text = (PROC / str(number) / "stat").read_bytes()
    except OSError:  # it ended meanwhile
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold anything
    return None if fields[0] in b"ZX" else (int(fields[1]), fields[19].decode())


def _table_of_ps() -> dict[int, tuple[int, str]]:
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split(None, 3) for line in listing.splitlines())
    return {int(row[0]): (int(row[1]), row[3]) for row in rows if len(row) == 4 and not row[2].startswith("Z")}


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if name.isdecimal()]


def _below(roots: Iterable[int], table: dict[int, tuple[int, str]]) -> Started:
    children: dict[int, list[int]] = {}
    for number, (parent, _) in table.items():
        children.setdefault(parent, []).append(number)
    found: Started = {}
    left = list(roots)
    while left:
        for number in children.get(left.pop(), ()):
            if number not in found:
                found[number] = table[number][1]
                left.append(number)
    return found


# -- the guard --------------------------------------------------------------------------------------------------------


class _Guard:
    """What the guard knows of its parent's descendants. Bounded by the processes that live and the shared memory there is."""

    def __init__(self, parent: int, mark: str, pipe: str, temporary: str) -> None:
        self._parent, self._mark, self._pipe = parent, f"{MARK}={mark}".encode(), f"pipe:[{pipe}]"
        self._private = Path(temporary), f"dynamo-*-{mark}-*"
        self._known: Started = {}
        self._shared: set[str] = set()  # names of shared memory that the parent or a descendant has mapped

    def look(self) -> bool:
        """Note the descendants of now; those whose own parent has died were noted before. Return whether they have changed."""
        before = self._known
        self._note(_table(), self._parent)
        self._note_shared([self._parent, *self._known])
        return self._known != before

    def _note(self, table: dict[int, tuple[int, str]], *roots: int) -> None:
        known = {number: begun for number, begun in self._known.items() if table.get(number, (0, ""))[1] == begun}
        self._known = {**known, **_below([*roots, *known], table)}
        self._known.pop(os.getpid(), None)

    def _note_shared(self, processes: Iterable[int]) -> None:
        there = _shared_names()
        self._shared &= there
        if there - self._shared:
            self._shared |= shared_memory_of(processes)

    def sweep(self) -> list[str]:
        """Kill what is left of the parent's descendants; return what that was."""
        began = alone_since = time.monotonic()
        killed: dict[int, str] = {}
        while (now := time.monotonic()) < began + SWEEP_SECONDS:
            table = _table()
            table.pop(os.getpid(), None)
            self._note(table)  # not what is below the parent: its number may be another process's by now
            left = {*self._known, *(number for number in table if self._is_marked(number))}
            if not left:
                break
            if not killed:
                self._note_shared(left)  # their memory, before they are gone
            commands = {number: _read(number, "cmdline") for number in left}
            if any(HELPER not in command for command in commands.values()):
                alone_since = now
            for number, command in commands.items():
                if HELPER in command and now < alone_since + HELPER_SECONDS:
                    continue
                _kill(number)
                if command:  # else it is ending already
                    killed.setdefault(number, f"{number} ({_read(number, 'comm').decode(errors='replace').strip()})")
            time.sleep(0.02)
        return list(killed.values())

    def remove_files(self) -> list[str]:
        """Remove the private directories and the shared memory that the dead left; return what that was."""
        removed = []
        temporary, pattern = self._private
        for directory in temporary.glob(pattern):
            with suppress(OSError, UnicodeDecodeError):
                self._shared.update((directory / SHARED_LIST).read_text().splitlines())
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                removed.append(str(directory))
        return removed + _remove_shared(self._shared)

    def _is_marked(self, number: int) -> bool:
        return self._mark in _read(number, "environ").split(b"\0") or self._pipe in _descriptors(number)


def _read(number: int, name: str) -> bytes:
    try:
        return (PROC / str(number) / name).read_bytes()
    except OSError:  # it ended meanwhile, is another user's, or this system has no such file
        return b""


def _descriptors(number: int) -> set[str]:
    """Return what the descriptors of a process refer to, as far as that can be read."""
    directory = PROC / str(number) / "fd"
    found = set()
    with suppress(OSError):
        for name in os.listdir(directory):
            with suppress(OSError):
                found.add(os.readlink(directory / name))
    return found


def _shared_names() -> set[str]:
    try:
        return {name for name in os.listdir(SHARED) if name.startswith(SHARED_NAMES)}
    except OSError:  # this system shows no such directory
        return set()


def _mapped(number: int) -> set[str]:
    """Return the names of the shared memory that a process has mapped, as far as that can be read."""
    before = os.fsencode(SHARED) + b"/"
    lines = _read(number, "maps").splitlines()
    return {os.fsdecode(line.partition(before)[2]) for line in lines if before in line}


def _remove_shared(names: Iterable[str], but_for: int = 0) -> list[str]:
    """Remove the shared memory that no living process has mapped but one; return what was removed."""
    left = _shared_names().intersection(names)
    for number in _table() if left else ():
        if number != but_for:
            left -= _mapped(number)
    removed = []
    for name in left:
        with suppress(OSError):  # another user's, or removed meanwhile
            (SHARED / name).unlink()
            removed.append(str(SHARED / name))
    return removed


def _kill(number: int) -> None:
    with suppress(OSError):  # it ended meanwhile
        os.kill(number, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Watch the parent until it is gone, then sweep."""
    parent = int(argv[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends with its parent, and with nothing else
        signal.signal(number, signal.SIG_IGN)
    guard = _Guard(parent, *argv[1:])
    gone = _descriptor_of(parent)
    seconds = shortest = LOOK_SECONDS if PROC.exists() else LOOK_SECONDS_WITHOUT_PROC
    while os.getppid() == parent:
        seconds = shortest if guard.look() else min(2 * seconds, LONGEST_LOOK_SECONDS)
        if gone is None:
            time.sleep(shortest)  # the only way to see that the parent is gone
        elif select.select([gone], [], [], seconds)[0]:
            break
    killed, removed = guard.sweep(), guard.remove_files()
    for deed, left in (("killed", killed), ("removed", removed)):
        if left:
            sys.stderr.write(f"process {parent} is gone; {deed} what it left behind: {', '.join(left)}\n")


def _descriptor_of(parent: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None where the system has none."""
    opened = getattr(os, "pidfd_open", None)
    try:
        return None if opened is None else int(opened(parent))
    except OSError:  # gone already, or an old kernel
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
