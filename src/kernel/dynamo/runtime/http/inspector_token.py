"""The token that protects the inspector of a frontend without keys: made at start, found by port by the same user's tools.

Loopback is reached by every user of a machine, so an address is no protection. The token stands in a file that only its
owner can read: `$XDG_RUNTIME_DIR/dynamo/inspect-PORT.json`, or `~/.cache/dynamo/run/inspect-PORT.json` without that variable.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

MAX_FILE_BYTES: Final = 16 * 1024
MAX_SWEPT: Final = 1_000  # files that a start examines


class InspectorAccess(Struct, frozen=True):
    """How the inspector of one frontend is reached."""

    url: str  # of the listener that serves it: http://127.0.0.1:8000
    token: str
    pid: int
    host: str = ""  # of the process: a home directory may be one for several machines
    pid_namespace: str = ""  # of `pid`: containers that share a home may share a host name, too; "" where there is none

    @property
    def is_of_here(self) -> bool:
        """Whether `pid` is a number of this machine, and of this namespace of it, so that it can be looked up."""
        return (self.host, self.pid_namespace) == (socket.gethostname(), _pid_namespace())


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def token_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the files."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "dynamo"
    home = environment.get("HOME")
    return (Path(home) if home else Path.home()) / ".cache" / "dynamo" / "run"


def publish_access(port: int, access: InspectorAccess, environment: Mapping[str, str] = os.environ) -> Path:
    """Write the file of a port, for its owner only; one that is there is replaced. Raises OSError.

    Files of frontends of this machine that were killed are removed.
    """
    folder = token_directory(environment)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    access = replace(access, host=socket.gethostname(), pid_namespace=_pid_namespace())
    for left in itertools.islice(folder.glob("inspect-*.json"), MAX_SWEPT):
        if _is_left_behind(left):
            left.unlink(missing_ok=True)
    path = _path(port, environment)
    descriptor, written = tempfile.mkstemp(dir=folder, prefix=".inspect-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(access))
        os.replace(written, path)  # whole or not at all, and through no link that stood there
    except BaseException:
        os.unlink(written)
        raise
    return path


def find_access(port: int, environment: Mapping[str, str] = os.environ) -> InspectorAccess | None:
    """Return how the inspector at a port is reached; None: no file of this user has it.

    A file of another user, or one that others can write, is not believed: it could send a key to a stranger's address.
    """
    return _read(_path(port, environment))


def _read(path: Path) -> InspectorAccess | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        try:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=InspectorAccess)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None


def remove_access(port: int, token: str, environment: Mapping[str, str] = os.environ) -> None:
    """Remove the file of a port if it holds this token: a frontend that came after may have written its own. Idempotent."""
    found = find_access(port, environment)
    if found is not None and found.token == token:
        _path(port, environment).unlink(missing_ok=True)


def _is_left_behind(path: Path) -> bool:
    """Return whether a file is of a process of this machine that runs no more."""
    access = _read(path)
    if access is None or not access.is_of_here:
        return False
    try:
        os.kill(access.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, or without /proc
        return ""


def _path(port: int, environment: Mapping[str, str]) -> Path:
    return token_directory(environment) / f"inspect-{port}.json"
