"""The inspectors of the other frontends of a cluster: found in discovery, called over HTTP, for one picture of all of them.

A record in discovery is only an address, and any process that may write there could put one. So the key that all frontends share is
never sent: a question carries a code that was made with it, for this address and this moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from dynamo.errors import DynamoException, InvalidArgument
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.discovery.base import FRONTENDS, Change, Discovery, Put
from dynamo.runtime.discovery.follow import follow

logger = logging.getLogger(__name__)

PEER_PATH: Final = "/admin/v1/peer"
PEER_HEADER: Final = "x-dynamo-peer"
MIN_KEY_CHARACTERS: Final = 16
MAX_FRONTENDS: Final = 64  # that are called; more would make each picture slow
ANSWER_SECONDS: Final = 1.0  # longer than the processes of a group have for theirs
REST_SECONDS: Final = 5.0  # in which one that gave no answer is not called: a watch takes a picture each second
FRESH_SECONDS: Final = 30.0  # by which clocks may differ
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MAX_HEAD_BYTES: Final = 64 * 1024
_ADDRESS: Final = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})/?")


class AdvertisedFrontend(Struct):
    """The record of one frontend in discovery."""

    url: str


class _NotUnderstood(ValueError):
    """Another frontend does not know this kind of question, as one of another version does; it does know others."""


class PeerAnswers(Struct):
    """The answers of the processes of another frontend, and the names of those that gave none."""

    answers: list[bytes]
    silent: list[str]


def checked_url(url: str) -> str:
    """Return the address of a frontend as it is advertised. Raises InvalidArgument for one that is none."""
    found = _ADDRESS.fullmatch(url)
    if found is None or int(found[1]) > 65_535:
        raise InvalidArgument(f"DYN_ADMIN_ADVERTISE: expected http://HOST:PORT, got {url[:128]!r}")
    return url.rstrip("/")


def peer_code(key: str, url: str, at_ms: int, question: bytes) -> str:
    """Return the value of the header that shows that a question for `url` comes from a frontend with the same key."""
    signed = b"%d\n%b\n%b" % (at_ms, url.encode(), question)
    return f"{at_ms}:{hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()}"


def is_from_peer(header: str, key: str, url: str, question: bytes, now_ms: int) -> bool:
    """Return whether a question for `url` came with a code that was made a moment ago with `key`."""
    at, _, _ = header.partition(":")
    if not (header.isascii() and at.isdecimal() and len(at) < 16):
        return False
    is_fresh = abs(now_ms - int(at)) <= FRESH_SECONDS * 1000
    return is_fresh and hmac.compare_digest(header.encode(), peer_code(key, url, int(at), question).encode())


class OtherFrontends:
    """Calls the other frontends. Used on the event loop only."""

    def __init__(self, store: Discovery, key: str, own_url: str | None) -> None:
        """`own_url`: by which others reach this one; None: it is not to be found, and finds others."""
        self._store, self._key, self.own_url = store, key, own_url
        self._urls: dict[str, str] = {}  # by the keys of their records
        self._resting: dict[str, float] = {}  # by address, until when it is not called: loop times
        self._work = Background()

    async def start(self) -> None:
        """Follow the others, and let them find this one."""
        self._work.keep(partial(self._follow, set()), "inspector: other frontends")
        if self.own_url is not None:
            digest = hashlib.blake2b(self.own_url.encode(), digest_size=8).hexdigest()
            record = msgspec.json.encode(AdvertisedFrontend(self.own_url))
            try:
                await self._store.put(f"{FRONTENDS}/{digest}/{self._store.lease_id:x}", record)
            except DynamoException as error:
                logger.warning("other frontends cannot find this one: its admin address was not written: %s", error)

    async def aclose(self) -> None:
        """Stop. The record goes with the lease. Idempotent."""
        await self._work.close()

    @property
    def urls(self) -> list[str]:
        """The addresses of the others, each once."""
        return sorted(set(self._urls.values()) - {self.own_url})[:MAX_FRONTENDS]

    def is_asked_rightly(self, header: str, question: bytes) -> bool:
        """Return whether a question to this frontend comes from one that has the key."""
        now_ms = int(time.time() * 1000)
        return self.own_url is not None and is_from_peer(header, self._key, self.own_url, question, now_ms)

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]:
        """Return the answers of the processes of all others, and the names of those that gave none."""
        urls = self.urls
        found = await asyncio.gather(*[self._ask_one(url, question) for url in urls])
        silent = [url for url, answers in zip(urls, found, strict=True) if answers is None]
        answers = [each for each in found if each is not None]
        silent += [name for each in answers for name in each.silent]
        return [answer for each in answers for answer in each.answers], silent

    async def _ask_one(self, url: str, question: bytes) -> PeerAnswers | None:
        now = asyncio.get_running_loop().time()
        if self._resting.get(url, 0.0) > now:
            return None
        self._resting.pop(url, None)
        code = peer_code(self._key, url, int(time.time() * 1000), question)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return msgspec.msgpack.decode(await _post(url, question, code), type=PeerAnswers)
        except _NotUnderstood as error:
            logger.info("the inspector of %s: %s", url, error)
            return None
        except (OSError, TimeoutError, EOFError, ValueError, msgspec.MsgspecError) as error:
            self._rest(url, now, str(error) or type(error).__name__)
            return None

    def _rest(self, url: str, now: float, why: str) -> None:
        logger.info("the inspector of %s does not answer, and is left out for %g s: %s", url, REST_SECONDS, why[:200])
        self._resting = {each: until for each, until in self._resting.items() if until > now}
        self._resting[url] = now + REST_SECONDS

    async def _follow(self, known: set[str]) -> None:
        changes: AsyncGenerator[list[Change], None]
        async with aclosing(follow(self._store, FRONTENDS, known)) as changes:
            async for batch in changes:
                self._take(batch)

    def _take(self, batch: Sequence[Change]) -> None:
        for change in batch:
            self._urls.pop(change.key, None)
            if isinstance(change, Put) and len(self._urls) < 4 * MAX_FRONTENDS:
                with suppress(msgspec.MsgspecError, InvalidArgument):  # no frontend writes such a record
                    record = msgspec.json.decode(change.value, type=AdvertisedFrontend)
                    self._urls[change.key] = checked_url(record.url)


def open_other_frontends(settings: InspectorSettings, store: Discovery) -> OtherFrontends | None:
    """Return the client of the other frontends; None where they share no key. Raises InvalidArgument for settings that cannot be."""
    if settings.peer_key is None:
        if settings.advertise is not None:
            raise InvalidArgument(
                "--admin-advertise needs DYN_ADMIN_PEER_KEY, which all frontends of the cluster share"
            )
        return None
    if len(settings.peer_key) < MIN_KEY_CHARACTERS:
        raise InvalidArgument(f"DYN_ADMIN_PEER_KEY needs at least {MIN_KEY_CHARACTERS} characters")
    return OtherFrontends(
        store, settings.peer_key, None if settings.advertise is None else checked_url(settings.advertise)
    )


async def _post(url: str, body: bytes, code: str) -> bytes:
    """Send a question, and return the answer. Raises OSError, EOFError, or ValueError for an answer that is none."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(host, parts.port, ssl=tls, limit=MAX_HEAD_BYTES)
    try:
        head = (
            f"POST {PEER_PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\n{PEER_HEADER}: {code}\r\nconnection: close\r\n"
            f"content-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("its head is too long") from error
        status = first.split(" ", 2)[1:2]
        if status == ["400"]:
            raise _NotUnderstood("it does not understand a question")
        if status != ["200"]:
            raise ValueError(f"it answered {first[:64]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        size = int(headers.get("content-length", "-1"))
        if not 0 <= size <= MAX_ANSWER_BYTES:
            raise ValueError(f"its answer has {size} bytes")
        return await reader.readexactly(size)
    finally:
        writer.transport.abort()
