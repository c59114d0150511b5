"""Processed media in shared memory: `extra_args.mm_kwargs_shm` of a request names it, and one worker reads it.

What the items hold is an engine's affair: they are bytes here, and nothing of them is unpickled.
"""

from __future__ import annotations

import os
import re
import secrets
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from dynamo.engines.handover import HOLD_SECONDS, MAX_BYTES, HeldFiles, Leftovers, TakenFile, shared_memory_directory
from dynamo.errors import InvalidArgument

FIELD: Final = "mm_kwargs_shm"  # of extra_args
PREFIX: Final = "mm_kwargs_"
MAX_ITEMS: Final = 1024
_WRITER_BYTES: Final = 3  # of the six behind the process in a name; the others count the messages
_NAMES: Final = re.compile(r"mm_kwargs_\d+_[0-9a-f]{12}_\d+", re.ASCII)


class ShmItem(msgspec.Struct, frozen=True):
    """One item: the name of its shared memory, and how many bytes of it are used."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0)]


class ShmMessage(msgspec.Struct, frozen=True):
    """The object under `extra_args.mm_kwargs_shm`."""

    modality: str
    items: Annotated[list[ShmItem], msgspec.Meta(max_length=MAX_ITEMS)]
    mm_hashes: list[str]


class MmKwargs(NamedTuple):
    """What a message stands for."""

    modality: str
    items: list[memoryview]
    mm_hashes: list[str]


class MmKwargsShmWriter:
    """Writes processed media for workers on the same machine."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, hold_seconds: float = HOLD_SECONDS) -> None:
        """`max_bytes` bounds what waits to be read, `hold_seconds` for how long."""
        directory = shared_memory_directory()
        self._leftovers = Leftovers(directory, PREFIX)
        self._leftovers.sweep()
        stem = f"{PREFIX}{os.getpid()}_{secrets.token_hex(_WRITER_BYTES)}"
        self._files = HeldFiles(directory, stem, max_bytes=max_bytes, hold_seconds=hold_seconds)
        self._messages = 0

    @property
    def waiting(self) -> int:
        """How many items no worker has read yet."""
        return len(self._files.waiting())

    async def write(
        self, modality: str, items: Sequence[bytes | memoryview], mm_hashes: Sequence[str]
    ) -> dict[str, Any]:
        """Write the items of one request, and return its `extra_args.mm_kwargs_shm`: all of them are there, or none.

        Raises InvalidArgument for a hash too few or too many and for too large items, and Overloaded while too much waits.
        """
        if len(mm_hashes) != len(items) or len(items) > MAX_ITEMS:
            raise InvalidArgument(
                f"{len(items)} items and {len(mm_hashes)} hashes: one for each of {MAX_ITEMS} at most"
            )
        self._leftovers.sweep_at_times()
        number, self._messages = self._messages, (self._messages + 1) % (1 << 24)
        written: list[ShmItem] = []
        try:
            for place, item in enumerate(items):
                name = f"{self._files.stem}{number:06x}_{place}"
                await self._files.put(name, (memoryview(item).cast("B") if len(item) else b"",))
                written.append(ShmItem(name, memoryview(item).nbytes))
        except BaseException:
            for each in written:
                self._files.remove(each.name)
            raise
        return dict(msgspec.to_builtins(ShmMessage(modality, written, list(mm_hashes))))

    async def aclose(self, wait_seconds: float = 2.0) -> None:
        """Give readers a moment to take what waits, and remove the rest."""
        await self._files.aclose(wait_seconds)


async def read_mm_kwargs(extra_args: Mapping[str, Any] | None, *, max_bytes: int = MAX_BYTES) -> MmKwargs | None:
    """Return what a request's `extra_args` name in shared memory, which is removed; None: they name nothing.

    Raises InvalidArgument for a message that is wrong or above the bound, and Disconnected where an item is gone; then
    the others are removed, too.
    """
    found = (extra_args or {}).get(FIELD)
    if found is None:
        return None
    try:
        message = msgspec.convert(found, ShmMessage)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"extra_args.{FIELD} is wrong: {error}") from error
    if any(_NAMES.fullmatch(item.name) is None for item in message.items):
        raise InvalidArgument(f"extra_args.{FIELD} names shared memory of another kind")
    directory = shared_memory_directory()
    try:
        if len(message.items) != len(message.mm_hashes):
            raise InvalidArgument(f"extra_args.{FIELD} has {len(message.items)} items, {len(message.mm_hashes)} hashes")
        if sum(item.size for item in message.items) > max_bytes:
            raise InvalidArgument(f"extra_args.{FIELD} has more bytes than the bound of {max_bytes}")
        items = await to_thread(_take_all, directory, message.items, max_bytes)
    finally:
        for item in message.items:
            (directory / item.name).unlink(missing_ok=True)
    return MmKwargs(message.modality, items, message.mm_hashes)


def _take_all(directory: Path, items: Sequence[ShmItem], max_bytes: int) -> list[memoryview]:
    found = []
    for item in items:
        data = TakenFile.open(directory / item.name, max_bytes=max_bytes, maps=True).data
        if data.nbytes < item.size:  # it may be longer: some systems round up to whole pages
            raise InvalidArgument(f"{item.name} has {data.nbytes} bytes, and the message says {item.size}")
        found.append(data[: item.size])
    return found
