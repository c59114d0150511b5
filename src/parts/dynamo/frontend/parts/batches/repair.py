"""Rows for stored files that the index has lost."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.batches.directory import BatchDirectory
from dynamo.frontend.parts.batches.index import BatchIndex
from dynamo.frontend.parts.batches.records import FileRecord
from dynamo.protocol.batches.objects import FileObject


def check_index(directory: BatchDirectory) -> None:
    """Refuse a directory with stored files and no index. Raises InvalidArgument that names the way out.

    A new index would name none of the files, and their owners would find them gone.
    """
    if directory.index.exists():
        return
    count = sum(1 for _ in directory.blobs())
    if count:
        raise InvalidArgument(
            f"{directory.root} holds {count} stored file(s), and {directory.index.name} is gone; put it back from a "
            f"backup, or list the files in a new one: dynamo files repair {directory.root}"
        )


def repair(root: Path, owner: str) -> list[FileObject]:
    """Add a row for each stored file that has none, and return these files.

    Raises InvalidArgument where a frontend serves the directory, or it cannot be used.
    """
    directory = BatchDirectory(root, allow_network=True)
    if not directory.try_lock():
        raise InvalidArgument(f"a frontend serves {root}; stop it first")
    index: BatchIndex | None = None
    try:
        index = BatchIndex(directory.index)
        found = []
        for id, path in directory.blobs():
            if index.knows_file(id):
                continue
            with path.open("rb") as content:
                sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            looked = path.stat()
            file = FileObject(
                id=id, bytes=looked.st_size, created_at=int(looked.st_mtime), filename=id, purpose="user_data"
            )
            index.add_file(FileRecord(file=file, owner=owner, sha256=sha256))
            found.append(file)
        return found
    finally:
        if index is not None:
            index.close()
        directory.unlock()
