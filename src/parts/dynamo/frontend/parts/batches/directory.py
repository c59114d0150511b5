"""The directory of files and batches: where everything lies in it, and which process runs its batches.

index.sqlite     the rows of files and batches
blobs/ab/ID      the bytes of a file
uploads/         files on their way in; emptied when a runner starts
work/BATCH/      lines.idx, out.jsonl and err.jsonl of a batch that has not ended
runner.lock      held by the one process that runs the batches
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument

_NETWORK_TYPES: Final = (
    "9p",
    "afs",
    "ceph",
    "cifs",
    "fuse.",
    "gfs2",
    "glusterfs",
    "lustre",
    "ncpfs",
    "nfs",
    "ocfs2",
    "smb",
)
"""File systems on which SQLite's locks, or ours, may not hold between machines."""


class BatchDirectory:
    """The paths below one directory."""

    def __init__(self, root: Path, *, allow_network: bool = False) -> None:
        """Make the directory where it is not there yet. Raises InvalidArgument when it cannot be used."""
        self.root = root
        self._lock: int | None = None
        try:
            for each in (root, root / "blobs", root / "uploads", root / "work"):
                each.mkdir(mode=0o700, parents=each is root, exist_ok=True)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(f"{root} cannot be written")
        except OSError as error:
            raise InvalidArgument(f"the directory of files {root} cannot be used: {error}") from error
        kind = _file_system(root)
        if kind.startswith(_NETWORK_TYPES) and not allow_network:
            raise InvalidArgument(
                f"the directory of files {root} is on a network file system ({kind}), where locks may not hold; use a local "
                "directory, or set DYN_FILES_DIR_FORCE=1 if one machine alone uses it"
            )

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    def blob(self, file_id: str) -> Path:
        """Return where the bytes of a file lie. `file_id` is one that we made: it names no other place."""
        return self.root / "blobs" / file_id[-2:] / file_id

    def uploads(self) -> Path:
        return self.root / "uploads"

    def upload_bytes(self, mark: str) -> int:
        """Return what the uploads of all processes with this mark in their names take."""
        found = 0
        with os.scandir(self.uploads()) as entries:
            for entry in entries:
                if mark in entry.name:
                    with contextlib.suppress(FileNotFoundError):  # it has just ended
                        found += entry.stat().st_size
        return found

    def work(self, batch_id: str) -> Path:
        return self.root / "work" / batch_id

    def working(self) -> list[str]:
        """Return the ids of the batches with a working directory."""
        return sorted(os.listdir(self.root / "work"))

    def blobs(self) -> Iterator[tuple[str, Path]]:
        """Walk the stored files as (id, path)."""
        for shelf in sorted(os.listdir(self.root / "blobs")):
            for file_id in sorted(os.listdir(self.root / "blobs" / shelf)):
                yield file_id, self.root / "blobs" / shelf / file_id

    def discard_work(self, batch_id: str) -> None:
        """Remove the working directory of a batch; idempotent."""
        shutil.rmtree(self.work(batch_id), ignore_errors=True)

    def discard_blob(self, file_id: str) -> None:
        """Remove the bytes of a file; idempotent."""
        self.blob(file_id).unlink(missing_ok=True)

    # -- the runner's lock ---------------------------------------------------------------------------------------------

    @property
    def is_runner(self) -> bool:
        """Whether this process holds the lock."""
        return self._lock is not None

    def try_lock(self) -> bool:
        """Become the runner of this directory, if no living process is."""
        if self._lock is not None:
            return True
        descriptor = os.open(self.root / "runner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def unlock(self) -> None:
        """Let another process run the batches; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`; empty where the system does not report it."""
    found, longest = "", -1
    place = str(path.resolve())
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = point == "/" or place == point or place.startswith(point + "/")
            if inside and len(point) >= longest:
                found, longest = after.split()[0], len(point)
    return found
