"""Requests that end the workers that serve them: how to distinguish such a request from one that was only unlucky.
Pure.

A worker's death counts against a request when the request had been sent to that worker and had received nothing from it yet.
A token received clears the request: its content got past the place where the earlier worker died. So a request is convicted
when two workers of one role in a row died on it without a token, and about as long after they took it: what a request does to a
worker, it does again in the same way, while a worker that is killed for another reason dies at any time. Its content is
remembered for a while, so that the same request is refused at once instead of ending two workers more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from dynamo.errors import Disconnected, DynamoException, EngineShutdown, RequestKillsWorkers
from dynamo.router.pool import ChosenWorker, ModelPool

__all__ = ["MAX_DEATHS", "REMEMBERED_SECONDS", "QueriesOfDeath", "Suspect", "content_hash"]

logger = logging.getLogger(__name__)

MAX_DEATHS: Final = 2
"""Workers that may die on one request in a row: it is moved once for that reason."""

ALIKE_SECONDS: Final = 2.0
ALIKE_FACTOR: Final = 2.0
"""Two times between taking a request and dying are alike if both are below `ALIKE_SECONDS`, or within this factor."""

REMEMBERED_SECONDS: Final = 300.0
CAPACITY: Final = 1024  # requests remembered; the oldest is forgotten

_NOT_CONTENT: Final = frozenset({"routing", "agent_context", "annotations", "router_config_override"})


class QueriesOfDeath:
    """The content hashes of convicted requests, each for a while."""

    __slots__ = ("_until", "remembered")

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # in order of time; bounded by CAPACITY
        self.remembered: Mapping[bytes, float] = self._until  # empty: no request need be hashed

    def __len__(self) -> int:
        return len(self._until)

    def remember(self, digest: bytes, now: float) -> None:
        """Refuse this content until `REMEMBERED_SECONDS` from `now`."""
        self._until.pop(digest, None)
        if len(self._until) >= CAPACITY:
            del self._until[next(iter(self._until))]
        self._until[digest] = now + REMEMBERED_SECONDS

    def contains(self, digest: bytes, now: float) -> bool:
        """Return whether this content is to be refused at `now`."""
        while self._until and (oldest := next(iter(self._until.items())))[1] <= now:
            del self._until[oldest[0]]
        return digest in self._until

    def acquit(self, digest: bytes) -> None:
        """Forget a content: a worker has answered a request that has it."""
        self._until.pop(digest, None)


class Suspect:
    """One request, and the workers that died on it in a row without having sent anything."""

    __slots__ = ("_body", "_deaths", "_memory", "_pool", "_request_id", "_seconds")

    def __init__(self, body: Mapping[str, object], request_id: str, memory: QueriesOfDeath) -> None:
        self._body, self._request_id, self._memory = body, request_id, memory
        self._deaths = 0
        self._pool: ModelPool | None = None  # of the last death
        self._seconds = 0.0  # from sending the request to the last death

    def check(self, clock: Callable[[], float]) -> None:
        """Raise `RequestKillsWorkers` if a request of the same content was convicted a while before the time of `clock`."""
        if self._memory.remembered and self._memory.contains(content_hash(self._body), clock()):
            logger.warning("request %s: refused, as workers died on a request of the same content", self._request_id)
            raise RequestKillsWorkers("workers died while they served a request of the same content")

    def count_failure(
        self, pool: ModelPool, worker: ChosenWorker, error: DynamoException, *, sent_at: float, now: float
    ) -> None:
        """Take a failure of a worker that had not sent anything; raise `RequestKillsWorkers` at the second death in a row.

        A death is a connection that broke under the request, or an engine of which its worker reports that it died. A
        worker that drains is out of discovery before it closes anything, and any other error that a worker reports shows
        that the worker lives. A prefill worker and a decode worker do different work: a death in another `pool` than the
        one before is the first of a new row.
        """
        if not _is_death(error):
            return
        if pool.instance(worker.instance.instance_id) is None:
            return
        if pool is not self._pool:
            self._pool, self._deaths = pool, 0
        before, self._seconds = self._seconds, now - sent_at
        if self._deaths and not _are_alike(before, self._seconds):
            return
        self._deaths += 1
        if self._deaths < MAX_DEATHS:
            return
        self._memory.remember(content_hash(self._body), now)
        logger.error(
            "request %s: %d workers in a row died before they had sent anything of its answer; the request ends, and the "
            "same content is refused for %g s",
            self._request_id,
            self._deaths,
            REMEMBERED_SECONDS,
        )
        raise RequestKillsWorkers(f"{self._deaths} workers died while they served the request") from error

    def passed(self, pool: ModelPool) -> None:
        """End the row of deaths in one role: a worker of it has done its part of the request."""
        if pool is self._pool:
            self._deaths = 0

    def acquit(self) -> None:
        """Clear the request and its content: a worker has answered it."""
        self._deaths = 0
        if self._memory.remembered:
            self._memory.acquit(content_hash(self._body))


def _is_death(error: DynamoException) -> bool:
    if isinstance(error, EngineShutdown):  # with this cause: the connection between worker and engine broke
        return isinstance(error.__cause__, Disconnected)
    return isinstance(error, Disconnected) and not error.is_reported


def _are_alike(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high <= max(ALIKE_SECONDS, ALIKE_FACTOR * low)


def content_hash(body: Mapping[str, object]) -> bytes:
    """Return a digest of what an engine computes from `body`: two requests of the same content have the same digest."""
    content = {name: value for name, value in body.items() if name not in _NOT_CONTENT}
    if isinstance(options := content.get("sampling_options"), Mapping) and "seed" in options:
        content["sampling_options"] = {name: value for name, value in options.items() if name != "seed"}
    return hashlib.blake2b(msgspec.msgpack.encode(content, order="sorted"), digest_size=16).digest()
