"""The directory of files and batches, opened: where they lie, what they may cost, and the threads that use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from msgspec import Struct

from dynamo.frontend.base.shares import Shares
from dynamo.frontend.parts.batches.directory import BatchDirectory
from dynamo.frontend.parts.batches.index import BatchIndex
from dynamo.frontend.parts.batches.input_check import InputChecks
from dynamo.frontend.parts.batches.repair import check_index
from dynamo.frontend.parts.batches.stored_files import FileLimits, FileRoom, StoredFiles
from dynamo.frontend.pipeline.settings import PipelineSettings

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = 4
CHECKS: Final = 2  # of inputs at once: one takes seconds of a thread
MAX_OPEN_BATCHES: Final = 256  # that have not ended; each holds a window of its lines
CONCURRENCY_SHARE: Final = 4  # of the requests in flight, batches may have one in so many


class BatchSettings(Struct, frozen=True):
    """Where files and batches lie, and what they may cost."""

    directory: Path
    limits: FileLimits
    allow_network: bool = False
    concurrency: int | None = None  # lines at once; None: a quarter of the requests in flight
    model_wait_seconds: float = (
        30.0  # after the start: until then a model that is not there may not have been found yet
    )


class BatchRoom:
    """One directory, opened: its files and its index, the threads that use them, and the bounds that all owners share."""

    def __init__(
        self, settings: BatchSettings, pipeline: PipelineSettings, shares: Shares, now: Callable[[], float]
    ) -> None:
        """Raises InvalidArgument when the directory cannot be used."""
        self.directory = BatchDirectory(settings.directory, allow_network=settings.allow_network)
        check_index(self.directory)
        self.index = index = BatchIndex(self.directory.index)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dynamo-batches")
        count = partial(self.disk, index.open_batches_of_owners)
        self.batches = shares.bound("batches", MAX_OPEN_BATCHES, count=count)
        concurrency = settings.concurrency or max(1, pipeline.max_requests_in_flight // CONCURRENCY_SHARE)
        self.lines = shares.bound("batch lines", concurrency, weight=None)
        longest = pipeline.limits.body_limit_bytes
        self.checks = InputChecks(shares.bound("input checks", CHECKS), max_line_bytes=longest)
        self.files = StoredFiles(self.directory, index, self.disk, FileRoom(settings.limits, shares), now=now)
        shares.show("files", None, settings.limits.owner_bytes, partial(self.disk, index.file_bytes))

    async def disk(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run what waits for the disk in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **named))

    def close(self) -> None:
        """Wait for what runs. Idempotent."""
        self._threads.shutdown()
        self.checks.close()
        self.index.close()
        self.directory.unlock()
