"""Checks the input file of a batch, all of it or nothing, and notes where each line begins.

Lines are read one at a time: memory holds the custom ids and nothing else of the file. An owner has one check at a time, in
one of a few threads that do nothing else, so that a large file holds up neither other owners nor the reading of other files.
"""

from __future__ import annotations

import asyncio
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.parts.batches.directory import sync_directory
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.protocol.batches.lines import BatchLine, check_line, count_inputs, decode_line
from dynamo.protocol.batches.objects import BatchErrorEntry
from dynamo.protocol.openai.body import BYTE_ORDER_MARK

MAX_LINES: Final = 50_000
MAX_EMPTY_LINES: Final = (
    50_000  # beside them: 60 MB of line feeds would keep a thread, and the interpreter, for a minute
)
EMBEDDINGS: Final = "/v1/embeddings"
MAX_ERRORS: Final = 100  # that are listed

_PLACE: Final = struct.Struct("<QI")  # where a line begins, and its length
_INDEX_NAME: Final = "lines.idx"


class CheckedInput(Struct):
    """What was found in an input file."""

    lines: int = 0
    model: str | None = None  # the one model that all lines name; None: there are several
    errors: list[BatchErrorEntry] = []


def check_input(source: Path, work: Path, endpoint: str, *, max_line_bytes: int) -> CheckedInput:
    """Check every line of `source`, and write the places of its lines into `work` if it has no error."""
    found = CheckedInput(errors=[])
    ids: set[str] = set()
    models: set[str | None] = set()
    places = bytearray()
    number = inputs = begin = end = 0
    try:
        with open(source, "rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                begin, end = end, end + len(line)
                if number > MAX_LINES + MAX_EMPTY_LINES:
                    text = f"A file may have at most {MAX_LINES + MAX_EMPTY_LINES} lines, the empty ones included."
                    found.errors = [BatchErrorEntry("too_many_tasks", text)]
                    return found
                if number == 1 and line.startswith(BYTE_ORDER_MARK):
                    line, begin = line[len(BYTE_ORDER_MARK) :], begin + len(BYTE_ORDER_MARK)
                error: BatchErrorEntry | None = None
                if len(line) > max_line_bytes and not line.endswith(b"\n"):
                    text = f"A line may have at most {max_line_bytes} bytes."
                    found.errors.append(BatchErrorEntry("line_too_long", text, number))
                    return found  # where the next line begins is not known
                if not line.strip():
                    continue
                found.lines += 1
                if found.lines > MAX_LINES:
                    text = f"A batch may have at most {MAX_LINES} lines."
                    found.errors = [BatchErrorEntry("too_many_tasks", text)]
                    return found
                checked = check_line(line, number, endpoint)
                if isinstance(checked, BatchErrorEntry):
                    error = checked
                else:
                    custom_id, model = checked[0].custom_id, checked[1]
                    if endpoint == EMBEDDINGS:
                        inputs += count_inputs(bytes(checked[0].body))
                        if inputs > MAX_LINES:
                            text = f"A batch may have at most {MAX_LINES} embedding inputs in all."
                            found.errors = [BatchErrorEntry("too_many_tasks", text)]
                            return found
                    if custom_id in ids:
                        text = f"The custom_id '{custom_id}' is that of an earlier line."
                        error = BatchErrorEntry("duplicate_custom_id", text, number, "custom_id")
                    ids.add(custom_id)
                    if len(models) < 2:
                        models.add(model)
                if error is not None:
                    found.errors.append(error)
                    if len(found.errors) >= MAX_ERRORS:
                        return found
                places += _PLACE.pack(begin, len(line))
    except OSError as error:
        found.errors = [BatchErrorEntry("invalid_file", f"The input file cannot be read: {error.strerror}.")]
        return found
    if not found.lines and not found.errors:
        found.errors.append(BatchErrorEntry("empty_file", "The input file has no lines."))
    if not found.errors:
        found.model = models.pop() if len(models) == 1 else None
        _write_places(work, bytes(places))
    return found


class InputChecks:
    """Checks inputs in threads, owner by owner."""

    def __init__(self, bound: SharedBound, *, max_line_bytes: int) -> None:
        """`bound`: how many checks run at once."""
        self._turns, self._max_line_bytes = FairSlots(bound), max_line_bytes
        self._threads = ThreadPoolExecutor(bound.limit, thread_name_prefix="dynamo-batch-checks")

    async def run(self, record: BatchRecord, source: Path, work: Path) -> CheckedInput:
        """Check the input of a batch when it is its owner's turn."""
        owner, batch = record.owner, record.batch
        check = partial(check_input, source, work, batch.endpoint, max_line_bytes=self._max_line_bytes)
        await self._turns.acquire(owner, batch.id)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, check)
        finally:
            self._turns.release(owner)
            self._turns.forget(owner, batch.id)

    def close(self) -> None:
        """Wait for the checks that run. Idempotent."""
        self._threads.shutdown()


class LineReader:
    """Reads the lines of a checked input file by their number, from 0."""

    def __init__(self, source: Path, work: Path) -> None:
        """Raises OSError."""
        self._source = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._places = (work / _INDEX_NAME).read_bytes()  # 12 bytes a line
        except OSError:
            os.close(self._source)
            raise

    def __len__(self) -> int:
        return len(self._places) // _PLACE.size

    def read(self, number: int) -> BatchLine:
        """Return one line. Raises OSError, and msgspec.DecodeError when the file was changed behind our back."""
        begin, length = _PLACE.unpack_from(self._places, number * _PLACE.size)
        return decode_line(os.pread(self._source, length, begin))

    def read_some(self, first: int, *, lines: int, limit_bytes: int) -> list[tuple[int, BatchLine]]:
        """Return the lines from `first` on: at most `lines` of them, and at least one, within `limit_bytes`."""
        found: list[tuple[int, BatchLine]] = []
        size = 0
        for number in range(first, min(len(self), first + lines)):
            size += _PLACE.unpack_from(self._places, number * _PLACE.size)[1]
            if found and size > limit_bytes:
                break
            found.append((number, self.read(number)))
        return found

    def close(self) -> None:
        os.close(self._source)


def has_places(work: Path) -> bool:
    """Return whether the input of a batch was checked before."""
    return (work / _INDEX_NAME).is_file()


def _write_places(work: Path, places: bytes) -> None:
    work.mkdir(mode=0o700, exist_ok=True)
    part = work / (_INDEX_NAME + ".part")
    with open(part, "wb") as file:
        file.write(places)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, work / _INDEX_NAME)
    sync_directory(work)
    sync_directory(work.parent)
