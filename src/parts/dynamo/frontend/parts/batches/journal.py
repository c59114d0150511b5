"""The results of one batch: two files that only grow. A line is done when its result is in one of them, and synced.

Runs in the service's thread. What the files hold decides after a crash; the index learns of it later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Raw, Struct

from dynamo.protocol.batches.lines import add_usage, line_number_of
from dynamo.protocol.batches.objects import BatchRequestCounts, BatchUsage

_NAMES: Final = {True: "out.jsonl", False: "err.jsonl"}
_COPY_BYTES: Final = 1024 * 1024


class LineResult(Struct, frozen=True):
    """The result of one line."""

    number: int
    is_success: bool
    line: bytes  # as it is written, its end included
    body: bytes = b""  # the answer in it


class _Response(Struct):
    body: Raw = Raw()


class _Written(Struct):
    id: str
    response: _Response | None = None


_read: Final = msgspec.json.Decoder(_Written).decode


class ResultJournal:
    """The result files in the working directory of a batch, and what they hold."""

    def __init__(self, work: Path, lines: int) -> None:
        """Open the files, or make them; cut what a crash left of a half-written line. Raises OSError."""
        self.counts = BatchRequestCounts(total=lines)
        self.usage = BatchUsage()
        self._done = bytearray(lines)
        self._paths = {is_success: work / name for is_success, name in _NAMES.items()}
        self._files: dict[bool, int] = {}
        self._sizes: dict[bool, int] = {}
        try:
            for is_success, path in self._paths.items():
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._files[is_success] = os.open(path, flags, 0o600)
                self._sizes[is_success] = self._recover(is_success)
        except BaseException:
            self.close()
            raise

    def is_done(self, number: int) -> bool:
        """Return whether a line has its result."""
        return bool(self._done[number])

    def missing(self) -> Iterator[int]:
        """Walk the lines without a result."""
        return (number for number, is_done in enumerate(self._done) if not is_done)

    def append(self, results: Sequence[LineResult]) -> None:
        """Write results and wait until the disk has them. Raises OSError, and the files are as before then."""
        fresh = [result for result in results if not self._done[result.number]]
        for is_success, file in self._files.items():
            if data := b"".join(result.line for result in fresh if result.is_success is is_success):
                try:
                    _write_all(file, data)
                    os.fdatasync(file)
                except OSError:
                    self._roll_back()
                    raise
        for result in fresh:
            self._sizes[result.is_success] += len(result.line)
            self._note(result.number, result.is_success, result.body)

    def path(self, is_success: bool) -> Path:
        """Return the file of the answered lines, or that of the failed ones."""
        return self._paths[is_success]

    def size(self, is_success: bool) -> int:
        return self._sizes[is_success]

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def _note(self, number: int, is_success: bool, body: bytes) -> None:
        self._done[number] = 1
        if is_success:
            self.counts.completed += 1
            add_usage(self.usage, body)
        else:
            self.counts.failed += 1

    def _roll_back(self) -> None:
        for is_success, file in self._files.items():
            os.ftruncate(file, self._sizes[is_success])

    def _recover(self, is_success: bool) -> int:
        """Read what is there; return how many bytes of it are whole lines, and cut the rest."""
        whole = 0
        with open(self._paths[is_success], "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    written = _read(line)
                    number = line_number_of(written.id)
                except (msgspec.DecodeError, ValueError):
                    break  # a disk that lost power may keep the length of a line and not its bytes
                if number < len(self._done) and not self._done[number]:
                    body = b"" if written.response is None else bytes(written.response.body)
                    self._note(number, is_success, body)
                whole += len(line)
        if os.fstat(self._files[is_success]).st_size != whole:
            os.ftruncate(self._files[is_success], whole)
        os.fsync(self._files[is_success])
        return whole


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest[:_COPY_BYTES]) :]
