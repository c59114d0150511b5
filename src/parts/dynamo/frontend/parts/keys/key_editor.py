"""Changes of a key file by commands: under a lock, written beside it, synced and renamed, so no reader sees half of one."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.keys.rules.key_file import KeyFileError

OWN_MODE: Final = 0o600  # of a new file: it holds no key, but the names of all


def change_key_file(path: str, change: Callable[[str], str], *, may_create: bool = False) -> None:
    """Replace what a file holds with what `change` makes of it.

    Two commands at once wait for each other. Raises InvalidArgument that names the file, which is as it was then.
    """
    target = Path(os.path.realpath(path))  # a link stays one, and its target is changed
    try:
        with _locked(target):
            try:
                before = target.read_text(encoding="utf-8")
                mode = stat.S_IMODE(target.stat().st_mode)
            except FileNotFoundError:
                if not may_create:
                    raise InvalidArgument(f"there is no key file {path}; dynamo keys create makes one") from None
                before, mode = "", OWN_MODE
            _replace(target, change(before).encode(), mode)
    except (KeyFileError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"the key file {path} cannot be changed: {error.strerror or error}") from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    # A file of its own: the key file is replaced, and a lock on the old one would lock nothing. It stays, since a process that
    # removed it would take it from under a command that waits.
    descriptor = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, data: bytes, mode: int) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWN_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
