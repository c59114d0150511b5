"""A file to which lines are appended off the event loop, in batches; made again where it was moved away."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.tasks import Background

logger = logging.getLogger(__name__)

STANDARD_ERROR: Final = "-"  # in place of a path
WRITE_SECONDS: Final = 0.2
MAX_WAITING: Final = 100_000  # lines; further ones are dropped, and counted in the log


class LineFile:
    """Lines of several processes may go to one file: a batch is written at once, at its end."""

    def __init__(self, path: str) -> None:
        """Raises InvalidArgument when the file cannot be written."""
        self._path = path
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._is_failing = False
        self._work = Background()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dynamo-lines")
        try:
            self._append(b"", is_synced=False)
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be written: {error.strerror or error}") from error

    def add(self, line: bytes) -> None:
        """Write a line soon; it has no line break. On the event loop."""
        if len(self._lines) >= MAX_WAITING:
            self._dropped += 1
            return
        self._lines.append(line)
        if not len(self._work):
            self._work.keep(self._follow, f"frontend: {self._path}")

    async def add_synced(self, line: bytes) -> None:
        """Write a line now, and return when it is on the disk. Raises OSError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: self._append(line + b"\n", is_synced=True))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self._write()

    async def _write(self) -> None:
        if not self._lines:
            return
        lines = list(self._lines)
        self._lines.clear()
        data, loop = b"\n".join([*lines, b""]), asyncio.get_running_loop()
        try:
            # Shielded: where `aclose` cancels this, the thread writes these lines all the same, and no other call does.
            await asyncio.shield(loop.run_in_executor(self._thread, lambda: self._append(data, is_synced=False)))
        except OSError as error:  # the lines wait for the next time
            self._lines.extendleft(reversed(lines))
            if not self._is_failing:
                logger.error("%s cannot be written: %s", self._path, error.strerror or error)
            self._is_failing = True
            return
        self._is_failing = False
        if self._dropped:
            logger.error("%d lines for %s were dropped while it could not be written", self._dropped, self._path)
            self._dropped = 0

    def _append(self, data: bytes, *, is_synced: bool) -> None:
        if self._path == STANDARD_ERROR:
            _write_all(2, data)
            return
        # Opened anew for each batch: a rotation moves the file away, and the next batch makes it again.
        descriptor = os.open(Path(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, data)
            if is_synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    async def aclose(self) -> None:
        """Write the rest."""
        await self._work.close()
        await self._write()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
