"""Divides limits among the frontends of a cluster, in the background, through the discovery store.

Each frontend holds slices of all limits before requests come, so that a request waits for no other process. Every half second, and when
another frontend has written, it adds up what it used, gives back what others need more, and takes what no frontend holds
(`dynamo.frontend.parts.keys.rules.division` has the rules). The records of the limits lie on 64 pages, so that a change of many limits is few
writes; a page is only replaced by one that saw it, so slices never overlap.

A frontend is a process, or a group of processes with one table of limits: one of these does all of this for the group.
While the store does not answer each frontend goes on with an equal part of every limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Final, Protocol, runtime_checkable

import msgspec

from dynamo.errors import DynamoException
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.quotas import Quotas
from dynamo.frontend.parts.keys.rules.division import Division, without
from dynamo.frontend.parts.keys.slices import Slice
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import LEASE_TTL_SECONDS, SHARED_LIMITS, Change, Discovery, Put, SharedRecords
from dynamo.runtime.discovery.follow import follow

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
START_SECONDS: Final = 2.0  # to get slices before the first request; peers answer within milliseconds
LEAVE_SECONDS: Final = 1.0
LOST_SECONDS: Final = LEASE_TTL_SECONDS + 1.0  # then the others have taken over what a frontend held that is cut off

SECONDS_OF_A_DAY: Final = 86_400
EVERY_NAMESPACE: Final = "*"  # the scope of frontends that serve all models of the store

MEMBERS: Final = "members"
PAGES: Final = "pages"
_IDENTITY: Final = "identity in the cluster"  # the record whose value the processes of a group have as their name

_decoder = msgspec.json.Decoder(dict[str, Division])


@runtime_checkable
class SharedStore(Discovery, SharedRecords, Protocol):
    """A discovery store that can hold the records."""


class _Slices:
    """The slices of the limits of all keys in service."""

    def __init__(self, quotas: Quotas, identities: Callable[[], Iterable[Identity]]) -> None:
        self._quotas, self._identities = quotas, identities
        self.by_id: dict[str, Slice] = {}

    def take_over_keys(self) -> None:
        """Add a slice for each limit that is new, and drop those of limits that are gone."""
        gates = self._quotas.book.all(self._identities())
        if gates.keys() == self.by_id.keys() and all(self.by_id[id].gate is gate for id, gate in gates.items()):
            return
        now = asyncio.get_running_loop().time()
        for id, gate in gates.items():
            known = self.by_id.get(id)
            if known is None:
                self.by_id[id] = Slice(gate, self._quotas, now)
            else:
                known.gate = gate
        for id in self.by_id.keys() - gates.keys():
            del self.by_id[id]


class ClusterLimits:
    """The part that this frontend has of every limit. Used on the event loop."""

    def __init__(
        self,
        quotas: Quotas,
        identities: Callable[[], Iterable[Identity]],
        store: SharedStore,
        *,
        scope: str = EVERY_NAMESPACE,
    ) -> None:
        """`identities` returns the keys in service. `scope`: the namespaces that the frontends serve which divide limits
        with this one; others of the same store have limits of their own.
        """
        self._quotas, self._store = quotas, store
        at = quotas.table.record(_IDENTITY, value=float(secrets.randbits(52) | 1))
        self.member = f"{int(quotas.table.value(at)):013x}"
        self._slices = _Slices(quotas, identities)
        self._seen = _Seen(f"{SHARED_LIMITS}/{scope}")
        self._leads = False
        self._lost_at: float | None = None
        self._work = Background()
        self._has_begun = asyncio.Event()

    @property
    def member_key(self) -> str:
        """The record by which the others know this frontend."""
        return f"{self._seen.root}/{MEMBERS}/{self.member}"

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, and wait a moment for the first slices."""
        self._work.keep(partial(self._follow, set()), "frontend: limits of the cluster")
        self._work.keep(self._run, "frontend: slices of limits")
        with suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._has_begun.wait()

    async def aclose(self) -> None:
        """Report what was used, and leave: the others get what this frontend held at once. Idempotent."""
        await self._work.close()
        if not self._leads or self._seen.pages is None:
            return
        self._leads = False
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._take_turns(self._seen.pages)
                await self._store.delete(self.member_key)
        except (TimeoutError, DynamoException) as error:
            logger.warning("the limits that this frontend held are free when its lease ends: %s", error or "no answer")

    async def _follow(self, known: set[str]) -> None:
        changes: AsyncGenerator[list[Change], None]
        async with aclosing(follow(self._store, self._seen.root, known)) as changes:
            async for batch in changes:
                self._seen.apply(batch)

    async def _run(self) -> None:
        while True:
            if self._seen.pages is not None:
                try:
                    await self._tick(self._seen.pages)
                except DynamoException as error:
                    logger.warning("the limits of the cluster cannot be divided now: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._seen.has_news.wait()
            self._seen.has_news.clear()

    async def _tick(self, pages: Mapping[int, _Page]) -> None:
        table = self._quotas.table
        if not self._leads:
            if not table.leads():
                self._has_begun.set()  # another process of the group does it
                return
            await self._store.put(self.member_key, b"{}")
            self._leads = True
            logger.info("this process (pid %d) divides the limits of its frontend with other frontends", os.getpid())
        table.set_value(self._quotas.book.frontends_at, float(len(self._alive())))
        self._slices.take_over_keys()
        if self._is_lost():
            return
        if await self._take_turns(pages):
            self._has_begun.set()

    def _alive(self) -> set[str]:
        return self._seen.members | {self.member}

    def _is_lost(self) -> bool:
        """Return whether the store does not answer, and fall back to an equal part of each limit then."""
        trouble, now = self._store.trouble(), asyncio.get_running_loop().time()
        if trouble is None:
            if self._lost_at is not None:
                logger.info("the discovery store answers again: limits are divided by need")
                self._seen.touch()
            self._lost_at = None
            return False
        if self._lost_at is None:
            self._lost_at = now
            logger.warning(
                "the discovery store does not answer: this frontend goes on with 1/%d of each limit (%s)",
                len(self._alive()),
                trouble,
            )
        may_grow = now - self._lost_at > LOST_SECONDS
        with self._quotas.table.locked():
            for one in self._slices.by_id.values():
                one.fall_back(len(self._alive()), may_grow=may_grow)
        self._has_begun.set()
        return True

    # -- turns -------------------------------------------------------------------------------------------------------

    async def _take_turns(self, pages: Mapping[int, _Page]) -> bool:
        """Take this frontend's turn on each page on which something has changed; whether it has all of its shares."""
        by_page: dict[int, list[Slice]] = {}
        for one in self._slices.by_id.values():
            by_page.setdefault(one.page, []).append(one)
        is_complete = True
        for number in sorted(by_page.keys() | pages.keys()):
            slices, page = by_page.get(number, []), pages.get(number)
            if (page is None or not page.is_new) and not any(one.has_changed() for one in slices):
                continue
            is_complete &= await self._take_turn(number, slices, page)
            await asyncio.sleep(0)  # a table of many limits takes its time, and streams go on meanwhile
        return is_complete

    async def _take_turn(self, number: int, slices: Iterable[Slice], page: _Page | None) -> bool:
        now, before = asyncio.get_running_loop().time(), {} if page is None else page.divisions
        if page is not None:
            page.is_new = False
        alive, is_complete = self._alive(), True
        after, is_news = self._tidied(before, alive)
        with self._quotas.table.locked():
            for one in slices:
                turn = one.look(before.get(one.id), self.member, alive, now)
                if turn is None:
                    continue
                is_complete &= not turn.is_short
                if turn.is_news:
                    is_news = True
                    after[one.id] = turn.division
        if is_news:
            value = msgspec.json.encode(after)
            if not await self._store.swap(
                f"{self._seen.root}/{PAGES}/{number:02}", None if page is None else page.value, value
            ):
                for one in slices:
                    one.look_again()
                return False  # another frontend was faster; what it wrote is on its way here
            self._seen.replace(number, page, value, after)
        with self._quotas.table.locked():
            for one in slices:
                one.take()
        return is_complete

    def _tidied(self, before: Mapping[str, Division], alive: Collection[str]) -> tuple[dict[str, Division], bool]:
        """Return a page after this frontend has left the records of limits that it does not have; whether it changed."""
        after, today = {}, int(self._quotas.wall_clock() // SECONDS_OF_A_DAY)
        is_news = False
        for id, one in before.items():
            kept = one if id in self._slices.by_id else without(one, self.member, alive, today)
            is_news = is_news or kept is not one
            if kept is not None:
                after[id] = kept
        return after, is_news


class _Page:
    """A page as it was last seen."""

    __slots__ = ("divisions", "is_new", "value")

    def __init__(self, value: bytes, divisions: dict[str, Division], *, is_new: bool) -> None:
        self.value, self.divisions, self.is_new = value, divisions, is_new


class _Seen:
    """What the store holds, as far as it was read."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.has_news = asyncio.Event()
        self.members: set[str] = set()
        self.pages: dict[int, _Page] | None = None
        """None: nothing was read yet."""

    def apply(self, batch: Iterable[Change]) -> None:
        """Take over what has changed."""
        pages = self.pages = {} if self.pages is None else self.pages
        for change in batch:
            kind, _, name = change.key.removeprefix(f"{self.root}/").partition("/")
            if kind == MEMBERS:
                (self.members.add if isinstance(change, Put) else self.members.discard)(name)
                self.touch()
            elif kind == PAGES and name.isdigit():
                number = int(name)
                if not isinstance(change, Put):
                    pages.pop(number, None)
                elif number not in pages or pages[number].value != change.value:
                    self.put(number, change.value, _decoded(change), is_new=True)
        self.has_news.set()

    def put(self, number: int, value: bytes, divisions: dict[str, Division], *, is_new: bool = False) -> None:
        """Note a page."""
        assert self.pages is not None
        self.pages[number] = _Page(value, divisions, is_new=is_new)

    def replace(self, number: int, before: _Page | None, value: bytes, divisions: dict[str, Division]) -> None:
        """Note a page that was written over `before`, unless news of it were faster than the answer to the write.

        Such news are of this write or of a later one: to put the write over a later one would hide that for good.
        """
        assert self.pages is not None
        if self.pages.get(number) is before:
            self.put(number, value, divisions, is_new=before is not None and before.is_new)

    def touch(self) -> None:
        """Mark all pages as new, so that they are read again."""
        for page in (self.pages or {}).values():
            page.is_new = True


def _decoded(change: Put) -> dict[str, Division]:
    try:
        return _decoder.decode(change.value)
    except msgspec.DecodeError as error:
        logger.error("%s is not a page of limits and is written anew: %s", change.key, error)
        return {}
