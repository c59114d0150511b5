"""Files: taken in piece by piece, listed, read and deleted; those whose time is over are removed."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from dynamo.frontend.base.shares import HELD_SHORTLY, Shares, fits_share
from dynamo.frontend.parts.batches.directory import BatchDirectory, sync_directory
from dynamo.frontend.parts.batches.group_commit import Disk
from dynamo.frontend.parts.batches.index import BatchIndex, FilesOf
from dynamo.frontend.parts.batches.records import FileRecord
from dynamo.protocol.batches.objects import BATCH_INPUT, FileObject
from dynamo.protocol.batches.requests import FileForm, PageQuery
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.steady_wall import steady_wall

logger = logging.getLogger(__name__)

WRITE_BYTES: Final = 1024 * 1024  # are collected before they are handed to a thread
MAX_UPLOADS: Final = 128  # at once in this process; each may hold as much in memory
BATCH_EXPIRY_SECONDS: Final = 30 * 86_400
ORPHAN_SECONDS: Final = 60.0  # a stored file without a row that is younger may be one of another process, on its way


class FileLimits(Struct, frozen=True):
    """How large files may be."""

    file_bytes: int
    batch_file_bytes: int  # of the input of a batch
    owner_bytes: int  # all files of one project
    owner_files: int  # how many there are of them


def no_such_file(id: str) -> RequestRejected:
    """Return the 404 for a file."""
    return RequestRejected(404, f"No such File object: {id[:128]}", param="id", stream_type="invalid_request_error")


class FileRoom:
    """What files and uploads may take: all of them, and those of one owner."""

    def __init__(self, limits: FileLimits, shares: Shares) -> None:
        self.limits, self._shares = limits, shares
        self._uploads = shares.bound("uploads", MAX_UPLOADS)

    def begin(self, owner: str) -> None:
        """Take a place for an upload. Raises RequestRejected."""
        if not self._uploads.take(owner):
            text = (
                f"Too many uploads at once: there may be {MAX_UPLOADS}, and {self._uploads.most_of_one()} of one "
                "project. Try again when one has ended"
            )
            raise RequestRejected(429, text, code="too_many_uploads", retry_after_seconds=1)

    def end(self, owner: str) -> None:
        """Give the place back."""
        self._uploads.give_back(owner)

    def check(self, before: FilesOf, more: int) -> None:
        """Raise the 413 of an owner that would have too many files, or too many bytes in them."""
        limits = self.limits
        if before.count >= limits.owner_files:
            text = f"There may be {limits.owner_files} files (DYN_FILES_TOTAL_COUNT); delete some first"
        elif before.bytes + more > limits.owner_bytes:
            megabytes = limits.owner_bytes // (1024 * 1024)
            text = f"All files together may have {megabytes} MB (DYN_FILES_TOTAL_MB); delete some first"
        else:
            return
        raise RequestRejected(413, text, param="file", code="storage_limit_exceeded")

    def check_disk(self, own: int, more: int, free: int) -> None:
        """Raise the 507 of an owner that has too much of the disk, of which so much is free."""
        if self._shares.has_others() and not fits_share(own + more, free - more, HELD_SHORTLY):
            text = "The disk is nearly full, and the files of this project have most of it; delete some first"
            raise RequestRejected(507, text, param="file", code="storage_limit_exceeded")


class Upload:
    """A file on its way in. Ended by `StoredFiles.keep` or by `discard`."""

    def __init__(self, path: Path, files: StoredFiles, owner: str) -> None:
        """Raises OSError."""
        self.path, self.owner = path, owner
        self.size = 0
        self._files = files
        self._digest = hashlib.sha256()
        self._parts = bytearray()
        self._is_ended = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    async def write(self, data: bytes, *, is_batch: bool) -> None:
        """Take further bytes. Raises RequestRejected: 413 when the file is too large, 507 when the disk is full."""
        limits = self._files.room.limits
        limit = limits.batch_file_bytes if is_batch else limits.file_bytes
        if self.size + len(self._parts) + len(data) > limit:
            what = "The input of a batch" if is_batch else "A file"
            raise RequestRejected(413, f"{what} may have at most {limit // (1024 * 1024)} MB", param="file")
        self._parts += data
        if len(self._parts) >= WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what was collected. Raises as `write`, and the 413 where its owner has no room for it."""
        parts, self._parts = self._parts, bytearray()
        try:
            await self._files.disk(self._write, parts)
        except OSError as error:
            raise storage_failed(error) from error

    def seal(self) -> str:
        """Wait until the disk has all of it; return its SHA-256. Runs in a thread. Raises OSError."""
        os.fsync(self._file)
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def discard(self) -> None:
        """Leave nothing of it; idempotent."""
        self.close()
        self.path.unlink(missing_ok=True)
        if not self._is_ended:
            self._is_ended = True
            self._files.room.end(self.owner)

    def _write(self, data: bytearray) -> None:
        if data:
            self._files.reserve(self.owner, self._file, self.size, len(data))
        self._digest.update(data)
        self.size += len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]


class StoredFiles:
    """The files of one directory."""

    def __init__(
        self,
        directory: BatchDirectory,
        index: BatchIndex,
        disk: Disk,
        room: FileRoom,
        *,
        now: Callable[[], float] = steady_wall,
    ) -> None:
        self._directory, self._index, self.disk, self.room, self._now = directory, index, disk, room, now
        self._reserving = threading.Lock()

    async def begin(self, owner: str) -> Upload:
        """Begin to take a file in. Raises RequestRejected: 429 where there are too many uploads of its owner, or of all."""
        self.room.begin(owner)
        name = f"{os.getpid()}-{_mark_of(owner)}-{uuid.uuid4().hex}"
        try:
            return Upload(self._directory.uploads() / name, self, owner)
        except OSError as error:
            self.room.end(owner)
            raise storage_failed(error) from error

    def reserve(self, owner: str, file: int, size: int, more: int) -> None:
        """Make an upload longer where its owner has room for that, with all that is on its way into this directory.

        Runs in a thread. Raises RequestRejected, and OSError.
        """
        with self._reserving:
            kept = self._index.files_of(owner)
            own = kept.bytes + self._directory.upload_bytes(_mark_of(owner))
            self.room.check(FilesOf(kept.count, own), more)
            status = os.statvfs(self._directory.uploads())
            self.room.check_disk(own, more, status.f_bavail * status.f_frsize)
            os.ftruncate(file, size + more)  # before the next one is checked

    async def keep(self, upload: Upload, filename: str, form: FileForm) -> FileObject:
        """Make an upload a file. Raises RequestRejected, and nothing of it is left then."""
        try:
            await upload.flush()
            return await self.disk(self._keep, upload, filename, form)
        except OSError as error:
            raise storage_failed(error) from error
        finally:
            upload.discard()

    async def get(self, id: str, owner: str) -> FileObject:
        """Return a file. Raises RequestRejected."""
        record = await self.disk(self._index.file, id, owner, self._now())
        if record is None:
            raise no_such_file(id)
        return record.file

    async def page(self, owner: str, query: PageQuery) -> tuple[list[FileObject], bool]:
        """Return one page of the files and whether there are more. Raises RequestRejected."""
        found = await self.disk(self._index.list_files, owner, query, self._now())
        if found is None:
            raise RequestRejected(400, f"after names no file: {query.after}", param="after")
        return [record.file for record in found[0]], found[1]

    async def delete(self, id: str, owner: str) -> None:
        """Delete a file. Raises RequestRejected: 409 while a batch reads it."""
        is_gone = await self.disk(self._index.delete_file, id, owner, self._now())
        if is_gone is None:
            raise no_such_file(id)
        if not is_gone:
            raise RequestRejected(
                409, f"File {id} is the input of a batch that has not ended; cancel the batch first", param="id"
            )
        await self.disk(self._directory.discard_blob, id)

    async def open(self, id: str, owner: str) -> tuple[int, FileObject]:
        """Open a file for reading; return its descriptor, which the caller closes. Raises RequestRejected."""
        found = await self.get(id, owner)
        try:
            return await self.disk(os.open, self._directory.blob(id), os.O_RDONLY | os.O_CLOEXEC), found
        except FileNotFoundError:
            raise no_such_file(id) from None

    async def remove_expired(self) -> None:
        """Remove some of the files whose time is over."""
        for id in await self.disk(self._index.expired_files, self._now()):
            await self.disk(self._directory.discard_blob, id)
            logger.info("file %s has expired and was removed", id)

    def sweep(self, keep: frozenset[str]) -> None:
        """Remove the half-arrived uploads of crashed processes, and name stored files without a row. Runs in a thread.

        `keep`: ids of files whose rows come later.
        """
        for path in self._directory.uploads().iterdir():
            owner_pid = path.name.partition("-")[0]
            if not owner_pid.isdecimal() or not _is_alive(int(owner_pid)):
                path.unlink(missing_ok=True)
        before = time.time() - ORPHAN_SECONDS
        unnamed = [
            id
            for id, path in self._directory.blobs()
            if id not in keep and not self._index.knows_file(id) and _changed_before(path, before)
        ]
        if unnamed:  # never deleted: an index that was put back from an old backup does not know the newest files
            logger.warning(
                "%d stored file(s) have no row in the index, %s for one; dynamo files repair lists them again",
                len(unnamed),
                unnamed[0],
            )

    def _keep(self, upload: Upload, filename: str, form: FileForm) -> FileObject:
        sha256 = upload.seal()
        now = int(self._now())
        seconds = form.expires_seconds
        if seconds is None and form.purpose == BATCH_INPUT:
            seconds = BATCH_EXPIRY_SECONDS
        file = FileObject(
            id=f"file-{uuid.uuid4().hex}", bytes=upload.size, created_at=now, filename=filename, purpose=form.purpose
        )
        if seconds is not None:
            file.expires_at = now + seconds
        target = self._directory.blob(file.id)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(upload.path, target)
        sync_directory(target.parent)
        sync_directory(target.parent.parent)
        record = FileRecord(file=file, owner=upload.owner, sha256=sha256)
        try:
            self._index.add_file(record, check=partial(self.room.check, more=file.bytes))
        except RequestRejected:
            target.unlink()
            raise
        return file


def _mark_of(owner: str) -> str:
    """Return what the uploads of an owner have in their names, which hold nothing of the owner's own."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]


def storage_failed(error: OSError) -> RequestRejected:
    """Return the answer to a request that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RequestRejected(507, "There is no room for the file on the server's disk", param="file")
    logger.error("the directory of files failed: %s", error)
    return RequestRejected(500, "The server could not store the file")


def _changed_before(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
