"""Requests that end the workers that serve them: how to distinguish such a request from one that was only unlucky.
Pure.

A worker's death counts against a request when the request had been sent to that worker and had received nothing from it yet.
A token received clears the request: its content got past the place where the earlier worker died. So a request is convicted
when two workers of one role in a row died on it without a token, and about as long after they took it: what a request does to a
worker, it does again in the same way, while a worker that is killed for another reason dies at any time. Its content is
remembered for a while, so that the same request is refused at once instead of ending two workers more.

Two deaths are not enough where something else explains them: another worker died meanwhile that the request had not been sent
to (a node that fails takes several), or a request of other content has lost the same two workers (one of the two may be
innocent). Then a third worker must die.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.errors import Disconnected, DynamoException, EngineShutdown, RequestKillsWorkers
from dynamo.router.workers.pool import ChosenWorker, ModelPool

logger = logging.getLogger(__name__)

MAX_DEATHS: Final = 2
"""Workers that may die on one request in a row: it is moved once for that reason."""

MAX_EXPLAINED_DEATHS: Final = 3  # the same where something else explains the first two

REMEMBERED_DEATHS: Final = 256  # of workers; the oldest is forgotten

ONE_DEATH_SECONDS: Final = (
    1.0  # all requests of a worker that died lose it within this time; a restarted one has its id
)

ALIKE_SECONDS: Final = 0.5
ALIKE_FACTOR: Final = 2.0
"""Two times between taking a request and dying are alike if both are below `ALIKE_SECONDS`, or within this factor."""

REMEMBERED_SECONDS: Final = 300.0
CAPACITY: Final = 1024  # requests remembered; the oldest is forgotten

_NOT_CONTENT: Final = frozenset({"routing", "agent_context", "annotations", "router_config_override"})


class _Death:
    """The death of one worker, and the requests that were waiting for its first token."""

    __slots__ = ("at", "contents")

    def __init__(self, at: float) -> None:
        self.at = at
        self.contents: set[bytes] = set()  # bounded by the requests that one worker has


class QueriesOfDeath:
    """The content hashes of convicted requests, each for a while, and the deaths of workers that were seen lately."""

    __slots__ = ("_deaths", "_moved", "_until", "remembered")

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}  # in order of time; bounded by CAPACITY
        self._deaths: dict[int, _Death] = {}  # by instance id, in order of time; bounded by REMEMBERED_DEATHS
        self._moved: dict[str, Suspect] = {}  # requests on which a worker died; bounded by CAPACITY
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

    # -- deaths ------------------------------------------------------------------------------------------------------

    def note_loss(self, pool: ModelPool, instance_id: int, error: DynamoException, now: float) -> None:
        """Note a worker that was lost in the middle of an answer, if it died. See `Suspect.count_failure`."""
        if _is_death(error) and pool.instance(instance_id) is not None:
            self._died(instance_id, now)

    def _died(self, instance_id: int, now: float) -> _Death:
        death = self._deaths.pop(instance_id, None)
        if death is None or now - death.at > ONE_DEATH_SECONDS:
            death = _Death(now)
        self._deaths[instance_id] = death
        if len(self._deaths) > REMEMBERED_DEATHS:
            del self._deaths[next(iter(self._deaths))]
        return death

    def _note(self, suspect: Suspect, instance_id: int, now: float) -> None:
        """Note a death that counts against a request."""
        self._died(instance_id, now).contents.add(suspect.content)
        self._moved[suspect.request_id] = suspect
        if len(self._moved) > CAPACITY:
            del self._moved[next(iter(self._moved))]

    def _forget(self, suspect: Suspect) -> None:
        self._moved.pop(suspect.request_id, None)

    def _explains(self, suspect: Suspect, row: Sequence[int], since: float) -> bool:
        """Return whether the deaths in `row` have an explanation other than the request that met them. `since`: it was sent."""
        content = suspect.content
        if any(death.at >= since and content not in death.contents for death in self._deaths.values()):
            return True  # a worker has died without it
        others = [self._deaths[each].contents - {content} if each in self._deaths else set() for each in row]
        # What waits at the last of these workers now has lost it, too; its own loss comes in the same turn of the loop.
        others[-1] = others[-1] | {each.content for each in self._moved.values() if each.worker_id == row[-1]}
        return bool(set.intersection(*others) - {content})


class Suspect:
    """One request, and the workers that died on it in a row without having sent anything."""

    __slots__ = (
        "_body", "_content", "_memory", "_pool", "_row", "_seconds", "_since", "request_id", "worker_id",
    )  # fmt: skip

    def __init__(self, body: Mapping[str, object], request_id: str, memory: QueriesOfDeath) -> None:
        self._body, self.request_id, self._memory = body, request_id, memory
        self._content: bytes | None = None
        self._row: list[int] = []  # the workers that died on it, at most MAX_EXPLAINED_DEATHS
        self._pool: ModelPool | None = None  # of the last death
        self._seconds = 0.0  # from sending the request to the last death
        self._since = 0.0  # when the request was sent to the first worker of the row
        self.worker_id: int | None = None  # where it waits now

    @property
    def content(self) -> bytes:
        """The hash of what an engine computes from it."""
        if self._content is None:
            self._content = content_hash(self._body)
        return self._content

    def sent(self, instance_id: int) -> None:
        """Note where it waits now."""
        self.worker_id = instance_id

    def check(self, clock: Callable[[], float]) -> None:
        """Raise `RequestKillsWorkers` if a request of the same content was convicted a while before the time of `clock`."""
        if self._memory.remembered and self._memory.contains(self.content, clock()):
            logger.warning("request %s: refused, as workers died on a request of the same content", self.request_id)
            raise RequestKillsWorkers("workers died while they served a request of the same content")

    def count_failure(
        self, pool: ModelPool, worker: ChosenWorker, error: DynamoException, *, sent_at: float, now: float
    ) -> None:
        """Take a failure of a worker that had not sent anything; raise `RequestKillsWorkers` at the second death in a row, or at
        the third where something else explains the first two.

        A death is a connection that broke under the request, or an engine of which its worker reports that it died. A
        worker that drains is out of discovery before it closes anything, and any other error that a worker reports shows
        that the worker lives. A prefill worker and a decode worker do different work: a death in another `pool` than the
        one before is the first of a new row.
        """
        if not _is_death(error):
            return
        instance_id = worker.instance.instance_id
        if pool.instance(instance_id) is None:
            return
        memory = self._memory
        memory._note(self, instance_id, now)
        before, self._seconds = self._seconds, now - sent_at
        if pool is not self._pool or not _are_alike(before, self._seconds):
            self._pool, self._row = pool, []
        if not self._row:
            self._since = sent_at
        self._row.append(instance_id)
        deaths = len(self._row)
        if deaths < MAX_DEATHS:
            return
        if deaths < MAX_EXPLAINED_DEATHS and memory._explains(self, self._row, self._since):
            return
        memory.remember(self.content, now)
        logger.error(
            "request %s: %d workers in a row died before they had sent anything of its answer; the request ends, and the "
            "same content is refused for %g s",
            self.request_id,
            deaths,
            REMEMBERED_SECONDS,
        )
        raise RequestKillsWorkers(f"{deaths} workers died while they served the request") from error

    def passed(self, pool: ModelPool) -> None:
        """End the row of deaths in one role: a worker of it has done its part of the request."""
        self.worker_id = None
        if pool is self._pool:
            self._row = []

    def acquit(self) -> None:
        """Clear the request and its content: a worker has answered it."""
        self._row, self.worker_id = [], None
        self._memory._forget(self)
        if self._memory.remembered:
            self._memory.acquit(self.content)

    def close(self) -> None:
        """Forget the request: it has ended."""
        self._memory._forget(self)


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
