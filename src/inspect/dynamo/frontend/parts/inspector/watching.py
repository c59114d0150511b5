"""Watches: a picture, and then what has changed of it, once a second or less often. A viewer that is slow costs no memory.

A patch leads from what was sent to this viewer last to what there is now, and is made when the viewer is ready for it. So
nothing queues up. A viewer that was cut off may go on from the last thing that it has: that is kept for a short time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from dynamo.frontend.parts.inspector.pictures import Entries, PictureQuery, entries_of, patch_between
from dynamo.frontend.parts.inspector.visitors import Visitor
from dynamo.protocol.inspector.views import Picture

MAX_VIEWERS: Final = 8
PERIOD_SECONDS: Final = 1.0
LONGEST_PERIOD_SECONDS: Final = 5.0
CPU_SHARE: Final = 0.005
"""Of a core: what one viewer may cost. Where pictures cost more, they come less often."""
KEEP_ALIVE_SECONDS: Final = 15.0
SLOW_SECONDS: Final = 5.0  # that a message takes; then the next one is a whole picture, as the viewer may have given up
RESUME_SECONDS: Final = 60.0
MAX_RESUMABLE: Final = MAX_VIEWERS

KEEP_ALIVE: Final = b": keep-alive\n\n"

Take = Callable[[PictureQuery, Visitor, int], Awaitable[Picture]]
"""Takes a picture with a number."""


class CpuMeter:
    """Adds up the CPU time of the parts of the work for viewers that wait for nothing."""

    def __init__(self, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        """`cpu_seconds`: what this thread has used so far."""
        self.seconds = 0.0
        self._cpu_seconds = cpu_seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what the block uses. Nothing in it may wait, or the work of others would count."""
        began = self._cpu_seconds()
        try:
            yield
        finally:
            self.seconds += self._cpu_seconds() - began


def period_of(costs: Sequence[float]) -> float:
    """Return the seconds from one picture to the next, after pictures of this CPU time; the lesser counts, as one may be odd."""
    return min(LONGEST_PERIOD_SECONDS, max(PERIOD_SECONDS, min(costs, default=0.0) / CPU_SHARE))


class TooManyViewers(Exception):
    """As many watch as may."""


class Watching:
    """The watches of one process. Used on the event loop only."""

    def __init__(self, take: Take, meter: CpuMeter | None = None) -> None:
        self._take = take
        self.meter = meter or CpuMeter()
        """Measures the work for viewers; `take` measures its own with it."""
        # Numbers of another life of this frontend, or of another process, are not taken for ours. JSON holds 53 bits.
        self._seq = secrets.randbelow(2**20) << 32
        self._watches: set[Viewer] = set()
        self._resumable: OrderedDict[tuple[PictureQuery, Visitor, int], tuple[float, Entries]] = OrderedDict()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._watches)

    def open(self, query: PictureQuery, visitor: Visitor, last_seq: int | None) -> Viewer:
        """Begin a watch; `last_seq`: the last number that the viewer has. Close it. Raises TooManyViewers."""
        if len(self._watches) >= MAX_VIEWERS:
            raise TooManyViewers
        entries = None
        if last_seq is not None:
            _, entries = self._resumable.pop((query, visitor, last_seq), (0.0, None))
        watch = Viewer(self, query, visitor, last_seq, entries)
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """End every watch."""
        self.is_closed = True
        for watch in list(self._watches):
            watch.leave()

    async def take(self, query: PictureQuery, visitor: Visitor) -> Picture:
        """Take a picture with the next number."""
        self._seq += 1
        return await self._take(query, visitor, self._seq)

    def left(
        self, watch: Viewer, query: PictureQuery, visitor: Visitor, seq: int | None, entries: Entries | None
    ) -> None:
        """Forget a watch, and keep what its viewer has for a while. Idempotent."""
        if watch not in self._watches:
            return
        self._watches.discard(watch)
        now = asyncio.get_running_loop().time()
        if seq is not None and entries is not None:
            self._resumable[query, visitor, seq] = now, entries
        while self._resumable:
            since, _ = next(iter(self._resumable.values()))
            if len(self._resumable) <= MAX_RESUMABLE and now - since < RESUME_SECONDS:
                break
            self._resumable.popitem(last=False)


class Viewer:
    """One viewer. `next` gives the next message of its event stream."""

    def __init__(
        self, watching: Watching, query: PictureQuery, visitor: Visitor, seq: int | None, entries: Entries | None
    ) -> None:
        self._watching, self._query, self._visitor = watching, query, visitor
        self._seq, self._entries = seq, entries  # what the viewer has
        self._left = asyncio.Event()
        self._at: float | None = None  # when the last picture was taken
        self._said_at = 0.0  # when the last message was made
        self._costs: deque[float] = deque(maxlen=2)  # CPU seconds of the last pictures

    async def next(self) -> bytes | None:
        """Return the next message; None at the end. The time until it is called again is that of the viewer."""
        loop = asyncio.get_running_loop()
        while True:
            if self._at is not None:
                await self._wait(self._at + period_of(self._costs))
            if self._left.is_set() or self._watching.is_closed:
                return None
            now = self._at = loop.time()
            meter = self._watching.meter
            before = meter.seconds
            picture = await self._watching.take(self._query, self._visitor)
            if self._entries is None:
                entries = entries_of(picture)
                self._has(picture.seq, entries, now)
                return _event(b"snapshot", picture.seq, msgspec.json.encode(picture))
            with meter.running():
                message = self._patch(self._entries, picture, now)
            self._costs.append(meter.seconds - before)
            if message is not None:
                return message
            if now - self._said_at >= KEEP_ALIVE_SECONDS:
                self._said_at = now
                return KEEP_ALIVE

    def _patch(self, known: Entries, picture: Picture, now: float) -> bytes | None:
        """Return what is new since the last message; None: nothing is."""
        entries = entries_of(picture)
        patch = patch_between(known, entries, picture)
        if not (patch.set or patch.gone or patch.progress) and self._said_at:
            return None
        self._has(picture.seq, entries, now)
        return _event(b"patch", picture.seq, msgspec.json.encode(patch))

    def sent(self, seconds: float) -> None:
        """Take how long a message took to send. A slow viewer gets a whole picture next: it may have given up on this one."""
        if seconds > SLOW_SECONDS:
            self._entries = None

    def leave(self) -> None:
        """End the watch: the viewer has left, or the frontend stops."""
        self._left.set()

    def close(self) -> None:
        """Let another viewer in. Idempotent."""
        self._watching.left(self, self._query, self._visitor, self._seq, self._entries)

    def _has(self, seq: int, entries: Entries, now: float) -> None:
        self._seq, self._entries, self._said_at = seq, entries, now

    async def _wait(self, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._left.wait()
        except TimeoutError:
            return


def _event(name: bytes, seq: int, data: bytes) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name, seq, data)
