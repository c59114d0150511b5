"""The last steps of a batch: its result files become stored files, and the index gets its final state.

Each step can be repeated. After a crash between any two of them the next runner calls `publish` again where the record has how
the batch ends, and begins with `seal` where it does not.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dynamo.frontend.parts.batches.directory import BatchDirectory, sync_directory
from dynamo.frontend.parts.batches.index import BatchIndex
from dynamo.frontend.parts.batches.input_check import LineReader
from dynamo.frontend.parts.batches.journal import LineResult, ResultJournal
from dynamo.frontend.parts.batches.records import BatchRecord, FileRecord
from dynamo.protocol.batches.lines import line_request_id, unexecuted_line
from dynamo.protocol.batches.objects import BATCH_OUTPUT, FileObject
from dynamo.protocol.batches.status import BatchStatus

_GROUP: Final = 1024  # unexecuted lines that are written and synced together
_UNEXECUTED: Final = {
    BatchStatus.EXPIRED: ("batch_expired", "This line was not executed before the batch expired."),
    BatchStatus.CANCELLED: ("batch_cancelled", "This line was not executed before the batch was cancelled."),
}
_HASH_BYTES: Final = 1024 * 1024

Step = Callable[[str], None]
"""Is called with the name of each step that is done."""


def result_file_id(batch_id: str, kind: str) -> str:
    """Return the id of a result file: always the same for a batch, so that a step that is repeated names the same file."""
    return "file-" + hashlib.sha256(f"{batch_id}:{kind}".encode()).hexdigest()[:32]


def seal(
    index: BatchIndex,
    batch_id: str,
    run: tuple[ResultJournal, LineReader] | None,
    ending: BatchStatus,
    now: float,
) -> BatchRecord | None:
    """Give every line without a result the reason why it was not executed, and record how the batch ends.

    `run`: None where no line was ever read. Returns None when the batch is gone. Raises OSError and sqlite3.Error.
    """
    if run is not None:
        journal, reader = run
        while missing := list(itertools.islice(journal.missing(), _GROUP)):
            journal.append([_unexecuted(batch_id, number, reader, ending) for number in missing])

    def change(record: BatchRecord) -> BatchRecord:
        if run is not None:
            record.batch.request_counts, record.batch.usage = run[0].counts, run[0].usage
        if ending is BatchStatus.COMPLETED:
            record.enter(BatchStatus.FINALIZING, now)
        record.ending = ending.value
        return record

    return index.change_batch(batch_id, change)


def publish(
    directory: BatchDirectory, index: BatchIndex, record: BatchRecord, now: float, after_step: Step
) -> BatchRecord | None:
    """Move the result files of a sealed batch where files lie, and end the batch; return its record.

    Raises OSError and sqlite3.Error: then it can be called again.
    """
    batch_id, work = record.batch.id, directory.work(record.batch.id)
    if record.ending is None:
        raise ValueError(f"batch {batch_id} was not sealed")
    ending = BatchStatus(record.ending)
    files: dict[str, FileRecord] = {}
    for kind, name in (("output", "out.jsonl"), ("error", "err.jsonl")):
        file_id = result_file_id(batch_id, kind)
        if _move(work / name, directory.blob(file_id)):
            files[kind] = _describe(record, file_id, kind, directory.blob(file_id), now)
        after_step(kind)

    def change(current: BatchRecord) -> BatchRecord:
        current.batch.output_file_id = files["output"].file.id if "output" in files else None
        current.batch.error_file_id = files["error"].file.id if "error" in files else None
        current.enter(ending, now)
        return current

    ended = index.change_batch(batch_id, change, files=list(files.values()))
    after_step("index")
    directory.discard_work(batch_id)
    after_step("work")
    return ended


def _unexecuted(batch_id: str, number: int, reader: LineReader, ending: BatchStatus) -> LineResult:
    code, message = _UNEXECUTED[ending]
    custom_id = reader.read(number).custom_id
    line = unexecuted_line(line_request_id(batch_id, number), custom_id, code, message)
    return LineResult(number, False, line)


def _move(source: Path, target: Path) -> bool:
    """Move a result file; return whether there is one. An empty one is none."""
    if source.exists():
        if not source.stat().st_size:
            return False
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(source, target)
        sync_directory(target.parent)
        sync_directory(target.parent.parent)
    return target.exists()


def _describe(record: BatchRecord, file_id: str, kind: str, path: Path, now: float) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while part := file.read(_HASH_BYTES):
            digest.update(part)
            size += len(part)
    described = FileObject(
        id=file_id,
        bytes=size,
        created_at=int(now),
        filename=f"{record.batch.id}_{kind}.jsonl",
        purpose=BATCH_OUTPUT,
    )
    if record.output_expires_seconds is not None:
        described.expires_at = int(now) + record.output_expires_seconds
    return FileRecord(file=described, owner=record.owner, sha256=digest.hexdigest())
