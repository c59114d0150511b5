"""The one place that gets media from outside, for every kind of media and every API; it fails closed.

One URL is fetched once at a time, however many requests name it; a fetch that no request waits for any more is ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import stat
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

from dynamo.errors import Overloaded
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.settings.media import FetchRules, MediaSettings
from dynamo.frontend.base.shares import largest_owner
from dynamo.frontend.parts.media.addresses import FetchTarget, MediaRefused, check_address, check_url
from dynamo.frontend.parts.media.content import Media, read_data_url, read_media
from dynamo.frontend.parts.media.http_get import Answered, get
from dynamo.frontend.parts.media.metrics import FetchOutcome
from dynamo.runtime.base.tasks import Background

MAX_URLS: Final = 4096
_MAX_AGE: Final = re.compile(r"(?:^|[\s,])(?:s-maxage|max-age)\s*=\s*\"?(\d{1,9})", re.IGNORECASE)
_NOT_KEPT: Final = re.compile(r"\b(?:no-store|no-cache|private)\b", re.IGNORECASE)

MAX_REDIRECTS: Final = 3
MAX_ADDRESSES: Final = 8  # of one host that are tried
INLINE_CHARACTERS: Final = 128 * 1024  # of a data URL that is read on the loop, which takes 0.2 ms
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and port to the addresses of the host. Raises OSError where it has none."""
_FlightKey = tuple[str, str, FetchRules]  # URL, kind


class MediaCache:
    """Least recently used first out, by bytes, of the owner that has most. Two URLs with one content share it."""

    def __init__(self, max_bytes: int, max_seconds: float, clock: Callable[[], float]) -> None:
        self._max_bytes, self._max_seconds, self._clock = max_bytes, max_seconds, clock
        self._contents: dict[bytes, str] = {}  # by digest, the owner of the request that fetched it first
        self._kept: dict[str, OrderedDict[bytes, Media]] = {}  # by owner
        self._bytes_of: dict[str, int] = {}
        self._urls: OrderedDict[Hashable, tuple[bytes, float]] = OrderedDict()  # key -> digest, fresh until
        self.bytes = 0

    def __len__(self) -> int:
        """Return how many contents are kept."""
        return len(self._contents)

    def find(self, key: Hashable) -> Media | None:
        """Return the content of a URL that is still fresh."""
        known = self._urls.get(key)
        if known is None:
            return None
        digest, until = known
        owner = self._contents.get(digest)
        if owner is None or self._clock() >= until:
            del self._urls[key]
            return None
        self._urls.move_to_end(key)
        kept = self._kept[owner]
        kept.move_to_end(digest)
        return kept[digest]

    def add(self, key: Hashable, media: Media, cache_control: str, owner: str = "") -> Media:
        """Keep a content that was fetched just now; return the one that is kept where it was known already."""
        first = self._contents.get(media.digest)
        if first is not None:
            owner, media = first, self._kept[first][media.digest]
        seconds = min(self._max_seconds, _fresh_seconds(cache_control, self._max_seconds))
        if seconds <= 0 or len(media.url) > self._max_bytes:
            return media
        self._urls[key] = media.digest, self._clock() + seconds
        self._urls.move_to_end(key)
        if len(self._urls) > MAX_URLS:
            self._urls.popitem(last=False)
        kept = self._kept.setdefault(owner, OrderedDict())
        if first is None:
            self._contents[media.digest], kept[media.digest] = owner, media
            self._count(owner, len(media.url))
        kept.move_to_end(media.digest)
        while self.bytes > self._max_bytes:
            self._drop_of(largest_owner(self._bytes_of))
        return media

    async def count(self) -> Mapping[str, int]:
        """Return how many bytes each owner has."""
        return dict(self._bytes_of)

    def _drop_of(self, owner: str) -> None:
        digest, dropped = self._kept[owner].popitem(last=False)
        del self._contents[digest]
        self._count(owner, -len(dropped.url))

    def _count(self, owner: str, more: int) -> None:
        self.bytes += more
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + more
        if not self._bytes_of[owner]:
            del self._bytes_of[owner], self._kept[owner]


def _fresh_seconds(cache_control: str, default: float) -> float:
    """Return how long a server lets its answer be kept; `default` where it sets nothing."""
    if not cache_control:
        return default
    if _NOT_KEPT.search(cache_control):
        return 0.0
    found = _MAX_AGE.search(cache_control)
    return default if found is None else float(found[1])


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve a host as this machine does."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class _Flight:
    """One fetch that is under way, and how many requests wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Task[Media]) -> None:
        self.task, self.waiting = task, 0


class PartFetcher:
    """Gets the content of parts; shared by all requests of a process."""

    def __init__(
        self,
        settings: MediaSettings,
        offload: Offload,
        count: Callable[[FetchOutcome], None] = lambda outcome: None,
        *,
        resolve: Resolve = resolve_host,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`count` is called for each part that a URL names. `clock`: of the cache; None: that of the running loop."""
        self._settings, self._offload, self._resolve, self._count = settings, offload, resolve, count
        self._places = asyncio.Semaphore(settings.concurrent_fetches)
        self._flights: dict[_FlightKey, _Flight] = {}
        self._work = Background()
        self._fetching_bytes = 0
        self.cache = MediaCache(settings.cache_bytes, settings.url_seconds, clock or _loop_time)

    async def aclose(self) -> None:
        """End every fetch. Idempotent."""
        await self._work.close()

    async def content(
        self, url: str, kind: str, rules: FetchRules, *, owner: str = "", is_upload: bool = False
    ) -> Media:
        """Return the content of a part of this kind. Raises MediaRefused, and Overloaded where too much is being fetched.

        `owner`: of what is kept. `is_upload`: a data URL may be as long as the body of its route.
        """
        scheme = url[:5].lower()
        if scheme == "data:":
            return await self._embedded(url, kind, len(url) if is_upload else self._settings.data_url_bytes)
        if scheme == "file:":
            path = self._local_file(url)
            return await self._offload(lambda: self._read_file(path, kind))
        check_url(url, rules)
        key = url, kind, rules
        if (known := self.cache.find(key)) is not None:
            self._count("cached")
            return known
        return await self._shared(key, owner)

    def check(self, url: str, rules: FetchRules) -> None:
        """Check a URL that another process is to fetch, as far as its text allows. Raises MediaRefused."""
        if url[:5].lower() == "file:":
            self._local_file(url)
        else:
            check_url(url, rules)

    # -- what needs no network ---------------------------------------------------------------------------------------

    async def _embedded(self, url: str, kind: str, max_bytes: int) -> Media:
        def read() -> Media:
            data = read_data_url(url, max_bytes)
            return read_media(data, kind, max_pixels=self._settings.pixels, given_url=url)

        return read() if len(url) <= INLINE_CHARACTERS else await self._offload(read)

    def _local_file(self, url: str) -> Path:
        """Return the file of a `file:` URL, links resolved. Raises MediaRefused unless it lies below the allowed directory."""
        if self._settings.local_path is None:
            raise MediaRefused('URLs of scheme "file" are not read here (DYN_MM_LOCAL_PATH)')
        parts = urlsplit(url)
        named = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or "\0" in named:
            raise MediaRefused("this is not the URL of a local file")
        try:
            allowed = Path(self._settings.local_path).resolve(strict=True)
            found = Path(named).resolve(strict=True)
        except (OSError, RuntimeError):
            raise MediaRefused("there is no such file below DYN_MM_LOCAL_PATH") from None
        if not found.is_relative_to(allowed):
            raise MediaRefused("there is no such file below DYN_MM_LOCAL_PATH")
        return found

    def _read_file(self, path: Path, kind: str) -> Media:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise MediaRefused("there is no such file below DYN_MM_LOCAL_PATH") from None
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise MediaRefused("this is not a regular file")
            if facts.st_size > self._settings.file_bytes:
                raise self._too_long()
            with open(handle, "rb", closefd=False) as source:
                data = source.read(self._settings.file_bytes + 1)
        finally:
            os.close(handle)
        if len(data) > self._settings.file_bytes:
            raise self._too_long()
        return read_media(data, kind, max_pixels=self._settings.pixels)

    def _too_long(self) -> MediaRefused:
        return MediaRefused(f"it has more than the {self._settings.file_bytes} bytes allowed (DYN_MM_MAX_FILE_SIZE_MB)")

    # -- what is fetched ---------------------------------------------------------------------------------------------

    async def _shared(self, key: _FlightKey, owner: str) -> Media:
        """Wait for the fetch of a URL, and begin it where none runs. The last one to leave ends it."""
        flight = self._flights.get(key)
        if flight is None:
            task = self._work.start(self._fetch(key, owner), "frontend: fetch media", is_awaited=True)
            flight = self._flights[key] = _Flight(task)
            task.add_done_callback(lambda done: self._landed(key, done))
        else:
            self._count("shared")
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()
            del flight  # its task has the error that is raised here, whose traceback has this frame

    def _landed(self, key: _FlightKey, task: asyncio.Task[Media]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # retrieved: a waiting caller gets it

    async def _fetch(self, key: _FlightKey, owner: str) -> Media:
        url, kind, rules = key
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self._fetching_bytes + count > self._settings.held_bytes:
                raise Overloaded("Too many media are being fetched (DYN_MM_MAX_HELD_MB)")
            self._fetching_bytes += count
            taken += count

        try:
            async with self._place(rules), asyncio.timeout(rules.timeout_seconds):
                self._count("fetched")
                answered = await self._follow(url, rules, take)
            if answered.is_compressed:  # what it unpacks to is counted before it is there
                take(self._settings.file_bytes)
            media = await self._offload(partial(self._read_answer, answered, kind))
            return self.cache.add(key, media, answered.cache_control, owner)
        except TimeoutError:
            raise MediaRefused(f"it was not fetched within {rules.timeout_seconds:g} s") from None
        finally:
            self._fetching_bytes -= taken

    @asynccontextmanager
    async def _place(self, rules: FetchRules) -> AsyncIterator[None]:
        """Hold one of the places for fetches. Raises Overloaded when none becomes free in the time that a fetch may take."""
        try:
            async with asyncio.timeout(rules.timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise Overloaded("Too many media are being fetched (DYN_MM_CONCURRENT_FETCHES)") from None
        try:
            yield
        finally:
            self._places.release()

    def _read_answer(self, answered: Answered, kind: str) -> Media:
        data = answered.unpacked(self._settings.file_bytes)
        return read_media(data, kind, max_pixels=self._settings.pixels)

    async def _follow(self, url: str, rules: FetchRules, take: Callable[[int], None]) -> Answered:
        """Return the content behind a URL and its redirects, every rule kept at every hop."""
        target = check_url(url, rules)
        for _ in range(MAX_REDIRECTS + 1):
            addresses = await self._addresses(target, rules)
            answered = await get(
                target, addresses, agent=rules.user_agent, max_bytes=self._settings.file_bytes, take=take
            )
            if answered.location is None:
                return answered
            try:
                url = urljoin(url, answered.location)
            except ValueError:
                raise MediaRefused("its server redirected it to what is not a URL") from None
            before, target = target, check_url(url, rules)
            if before.scheme == "https" and target.scheme == "http":
                raise MediaRefused("its server redirected it from https to http")
        raise MediaRefused(f"its server redirected it more than {MAX_REDIRECTS} times")

    async def _addresses(self, target: FetchTarget, rules: FetchRules) -> Sequence[str]:
        """Return the addresses to dial, each of them checked: one that is not allowed refuses the host."""
        if target.address is not None:
            return [target.address]
        try:
            found = await self._resolve(target.host, target.port)
        except OSError:
            raise MediaRefused("its host is not known") from None
        if not found:
            raise MediaRefused("its host is not known")
        for address in found:
            check_address(address, rules)
        return found[:MAX_ADDRESSES]


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
