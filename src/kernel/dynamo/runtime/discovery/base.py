"""What every discovery backend promises: records under a lease, and a watch without a gap.

Keys are `{bucket}/{key}` as in the native system (`v1/instances/ns/comp/ep/1f`), values are JSON bytes. Promises, held
by one set of contract tests over all backends:

* A key put under this store's lease lives as long as the process keeps the lease: it vanishes at `close`, at `delete`,
  and at most `ttl + 1` seconds (memory: at once) after the process died.
* `put_new` creates or leaves alone; `put` overwrites (only keys of one's own).
* A watch first delivers a snapshot, then every later change in order; nothing between the two is lost. After a failure of
  the store it delivers the difference between what it had delivered and what is true.
* Prefixes match whole segments: `a/b` matches `a/b` and `a/b/c`, not `a/bc`.
* Losing the store never stops a watch or a process: the last view stays, keys are put again when the store is back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, runtime_checkable

from msgspec import Struct

INSTANCES: Final = "v1/instances"
MODEL_CARDS: Final = "v1/mdc"
EVENT_CHANNELS: Final = "v1/event_channels"
EVENT_SOURCES: Final = "v1/event_sources"
SHARED_LIMITS: Final = "v1/limits"
FRONTENDS: Final = "v1/frontends"  # the admin addresses of those that advertise them

LEASE_TTL_SECONDS: Final = 10.0  # a dead worker is routable this long; shorter risks GC pauses and slow disks


class Put(Struct, frozen=True):
    """A key appeared or changed."""

    key: str
    value: bytes


class Delete(Struct, frozen=True):
    """A key vanished."""

    key: str


Change = Put | Delete


class Discovery(Protocol):
    """One process's view of the store. Coroutines run on the loop that created it; threads stay inside."""

    @property
    def lease_id(self) -> int:
        """The connection id (u64): the id of every instance of this runtime. Stable for the runtime's life."""

    def trouble(self) -> str | None:
        """Return why the view may be out of date; None while the store answers. May be called from any thread."""

    async def start(self) -> None:
        """Reach the store and take the lease. Raises `CannotConnect` naming the address and the flag."""

    async def put(self, key: str, value: bytes) -> None:
        """Write a key under this lease."""

    async def put_new(self, key: str, value: bytes) -> bool:
        """Write a key unless it exists; whether it was written."""

    async def delete(self, key: str) -> None:
        """Remove a key; absent is fine."""

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """Return the present keys under a prefix and their values."""

    def watch(self, prefix: str) -> AbstractAsyncContextManager[AsyncIterator[list[Change]]]:
        """Watch a prefix: `async with store.watch(p) as changes: async for batch in changes: ...`

        The first batch is the snapshot (possibly empty); every later batch has at least one change.
        """

    async def close(self) -> None:
        """Remove this process's keys and leave; idempotent."""


@runtime_checkable
class SharedRecords(Protocol):
    """A store with records that several processes write in turn, and that stay when these end."""

    async def swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Replace a record that is as `expected` (None: that does not exist), and let no other process write between.

        False: it was another one, and nothing was written. Raises `CannotConnect` when it is not known whether it was.
        """


def matches(prefix: str, key: str) -> bool:
    """Return whether `key` is `prefix` or below it, by whole segments; the empty prefix matches everything."""
    prefix = prefix.rstrip("/")
    return not prefix or key == prefix or key.startswith(prefix + "/")
