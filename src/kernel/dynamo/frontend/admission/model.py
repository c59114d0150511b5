"""The places of one model: the limit of its requests in flight, the limit of its queue's age, and the priorities.

A request without a place is rejected at once, before its prompt is read, with the time to come again. Nothing waits
here: an admitted request is on its way to a worker, so no later request of higher priority waits
behind it in this process.

Two limits, each with three heights, so that what is less urgent is refused first:

* places: a fixed number, or a multiple of what the model's workers run at once. The last fifth of them is not for requests
  below priority 0, the last tenth only for those above it;
* the age of the queue: of the oldest request that has had no token yet. A wait is a queue only while more requests are in
  flight than the workers run at once, so a long prefill beside free places never refuses a request. Requests below priority 0
  are refused at half the limit, those above it at twice the limit.

An owner of keys leaves some places to the others, and to it a queue is as old as its own oldest request.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from msgspec import Struct

from dynamo.errors import Overloaded
from dynamo.frontend.base.shares import HELD_SHORTLY, SharedBound, Shares
from dynamo.protocol.openai.requests import Request
from dynamo.protocol.openai.shapes import AgentHints, CommonRequest, NvExt
from dynamo.protocol.vectors.requests import ResultRequest

logger = logging.getLogger(__name__)

DEFAULT_QUEUE_AGE_SECONDS: Final = 120.0
"""Where nothing is set and the workers reported how much they run at once. Past it hardly a client still waits for its
first token, so what is computed is thrown away; below it engines with long queues of their own are left to work them
off.
"""

MAX_RETRY_SECONDS: Final = 60  # a client that stays away for longer than that might as well have been lost
RATE_SECONDS: Final = 10.0  # over how long the rate of first tokens is averaged: some steps, and not yet history
SAID_EVERY_SECONDS: Final = 30.0  # one line of the log for each so long spell of refusing


class Urgency(enum.IntEnum):
    """What a request's priority means here."""

    LOW = -1  # below 0
    NORMAL = 0
    HIGH = 1  # above 0, or in a strict tier above 0


_KEPT_FREE: Final[Mapping[Urgency, int]] = {Urgency.LOW: 5, Urgency.NORMAL: 10}  # one place of so many
_AGES: Final[Mapping[Urgency, float]] = {Urgency.LOW: 0.5, Urgency.NORMAL: 1.0, Urgency.HIGH: 2.0}


def urgency_of(nvext: NvExt | None) -> Urgency:
    """Read the urgency that the client sent as `nvext.agent_hints`, or as headers with the same meaning."""
    hints = None if nvext is None else nvext.agent_hints
    if hints is None:
        return Urgency.NORMAL
    if (hints.strict_priority or 0) > 0 or (hints.priority or 0) > 0:
        return Urgency.HIGH
    return Urgency.LOW if (hints.priority or 0) < 0 else Urgency.NORMAL


def cap_priority(request: Request | ResultRequest, most: int | None) -> None:
    """Hold a request to the priority of its key: what it sets, at most `most`, and `most` where it sets nothing.

    None: its key has none, and the request keeps its own.
    """
    if most is None:
        return
    if request.nvext is None:
        request.nvext = NvExt()
    hints = request.nvext.agent_hints = request.nvext.agent_hints or AgentHints()
    asked = hints.priority
    if isinstance(request, CommonRequest):
        asked, request.priority = request.priority if asked is None else asked, None
    hints.priority = most if asked is None else min(most, asked)
    hints.strict_priority = None  # which would go before all priorities
    hints.latency_sensitivity = None
    request.nvext.slo_ttft_ms = None  # which would go before those without one


class RequestLimit(Struct, frozen=True):
    """So many requests, or so many times what the workers run at once."""

    number: float
    is_factor: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "64" or "1.5x". Raises ValueError naming what is wrong."""
        is_factor = text.endswith("x")
        try:
            number = float(text[:-1]) if is_factor else int(text)
        except ValueError:
            raise ValueError(f"{text!r} is neither a number of requests (64) nor a factor (1.5x)") from None
        if not (0 < number < math.inf if is_factor else number >= 1):
            raise ValueError(f"{text} is not above 0")
        return cls(number, is_factor)

    def __str__(self) -> str:
        return f"{self.number:g}x" if self.is_factor else f"{self.number:g}"

    def places(self, capacity: int | None, share: float) -> int | None:
        """Return the limit as a number of requests; None: no limit, as the factor's base is unknown."""
        if not self.is_factor:
            whole = self.number
        elif capacity is None:
            return None
        else:
            whole = self.number * capacity
        return max(1, math.ceil(whole * share))


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What holds for every model of this process."""

    limit: RequestLimit | None = None
    queue_age_seconds: float | None = None  # None: the default above, where workers report what they run; 0: never
    share: float = 1.0  # of each model's capacity that this process may fill: it may be one of several on a port
    shares: Shares = field(default_factory=Shares)  # whether there are several owners


class Reason(enum.StrEnum):
    """Why a request was refused; a label of the metric."""

    PLACES = "places"  # all are taken
    RESERVED = "reserved"  # those that are free are for what is more urgent
    QUEUE_AGE = "queue_age"
    SHARE = "share"  # of its owner: those that are free are for other owners


class Shed(Overloaded):
    """Refused before anything was done for it."""

    def __init__(self, reason: Reason, retry_after_seconds: int) -> None:
        super().__init__(retry_after_seconds=retry_after_seconds)
        self.reason = reason


class _Starts:
    """The rate at which requests had their first tokens lately."""

    __slots__ = ("_at", "_since", "lately")

    def __init__(self) -> None:
        self.lately = 0.0  # first tokens, each weighted by how long ago it came
        self._at = self._since = 0.0

    def note(self, now: float) -> None:
        """Count a first token."""
        if not self.lately:
            self._since = now
        self.lately, self._at = self.lately * math.exp((self._at - now) / RATE_SECONDS) + 1.0, now

    def rate(self, now: float) -> float:
        """Return how many there were in a second."""
        measured = RATE_SECONDS * -math.expm1((self._since - now) / RATE_SECONDS)
        return self.lately * math.exp((self._at - now) / RATE_SECONDS) / max(measured, 1.0)


class ModelAdmission:
    """Counts one model's requests. Used on the event loop only; times are loop times.

    `enter` returns an `AdmissionSlot` or raises; the holder of a slot gives it back with `leave`, on every path.
    """

    __slots__ = ("_capacity", "_limit", "_model", "_policy", "_said_at", "_starts", "_waiting", "in_flight", "owners")

    def __init__(self, model: str, policy: AdmissionPolicy) -> None:
        self._model, self._policy = model, policy
        self._capacity: int | None = None
        self._limit: int | None = None
        self._waiting: OrderedDict[AdmissionSlot, None] = OrderedDict()  # without a token yet, in order of arrival
        self._starts = _Starts()
        self._said_at = -math.inf
        self.in_flight = 0
        self.owners = SharedBound(0, HELD_SHORTLY, policy.shares.has_others)  # the places of requests with a key
        self.set_capacity(None)

    def set_capacity(self, capacity: int | None) -> None:
        """Set how many requests the model's workers run at once, together; None: at least one worker did not report
        its capacity.
        """
        self._capacity = None if capacity is None else math.ceil(capacity * self._policy.share)
        limit = self._policy.limit
        self._limit = None if limit is None else limit.places(capacity, self._policy.share)
        self.owners.limit = self._limit or 0

    @property
    def capacity(self) -> int | None:
        """How many requests the workers run at once, this process's share of them; None: not all of them reported it."""
        return self._capacity

    @property
    def limit(self) -> int | None:
        """How many may be in flight at once in this process; None: as many as the frontend bears."""
        return self._limit

    @property
    def ignores_factor(self) -> bool:
        """Whether a configured limit cannot be kept, because the workers did not report what they run at once."""
        return self._policy.limit is not None and self._limit is None

    @property
    def queue_age_limit_seconds(self) -> float | None:
        """Above it requests of normal priority are refused; None: never."""
        asked = self._policy.queue_age_seconds
        if asked is None:
            return None if self._capacity is None else DEFAULT_QUEUE_AGE_SECONDS
        return asked or None

    @property
    def waiting(self) -> int:
        """Requests that have had no token yet."""
        return len(self._waiting)

    def queue_age_seconds(self, now: float) -> float:
        """Return how long the oldest waiting request has waited, in seconds; 0 while no request waits."""
        if not self._waiting or (self._capacity is not None and self.in_flight <= self._capacity):
            return 0.0
        return max(0.0, now - next(iter(self._waiting)).since)

    def enter(self, urgency: Urgency, now: float, owner: str | None = None) -> AdmissionSlot:
        """Take a slot for a request that arrived at `now`. `owner`: of its key; None: it has none. Raises `Shed`."""
        reason = self.rejection_reason(urgency, now, owner)
        if reason is not None:
            self._say(reason, now)
            raise Shed(reason, self.retry_after_seconds(now))
        self.in_flight += 1
        if owner is not None:
            self.owners.note(owner)
        slot = AdmissionSlot(self, now, owner)
        self._waiting[slot] = None
        return slot

    def rejection_reason(self, urgency: Urgency, now: float, owner: str | None = None) -> Reason | None:
        """Return why a request would be rejected now; None: it would be admitted."""
        limit, age_limit = self._limit, self.queue_age_limit_seconds
        if limit is not None:
            if self.in_flight >= limit:
                return Reason.PLACES
            kept_free = limit // _KEPT_FREE[urgency] if urgency in _KEPT_FREE else 0
            if self.in_flight >= limit - kept_free:
                return Reason.RESERVED
            if owner is not None and not self.owners.admits(self.owners.of(owner), self.in_flight):
                return Reason.SHARE
        if age_limit is not None and self.queue_age_seconds(now) > (most := age_limit * _AGES[urgency]):
            return Reason.QUEUE_AGE if self._waits_longer(owner, most, now) else None
        return None

    def _waits_longer(self, owner: str | None, seconds: float, now: float) -> bool:
        """Return whether the owner's own part of a queue that is too old is too old as well."""
        if owner is None or not self._policy.shares.has_others():
            return True
        return now - next((slot.since for slot in self._waiting if slot.owner == owner), now) > seconds

    def retry_after_seconds(self, now: float) -> int:
        """Return when it may be worth to come again: what waits now, by the rate at which requests had their first tokens lately."""
        if not self._starts.lately:  # unknown yet: it takes longer than it has taken so far
            seconds = now - next(iter(self._waiting)).since if self._waiting else 0.0
        else:
            rate = self._starts.rate(now)
            ahead = max(1, len(self._waiting))
            seconds = ahead / rate if rate * MAX_RETRY_SECONDS > ahead else MAX_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))

    def _begun(self, slot: AdmissionSlot, now: float) -> None:
        if slot not in self._waiting:
            return
        del self._waiting[slot]
        self._starts.note(now)

    def _left(self, slot: AdmissionSlot) -> None:
        self._waiting.pop(slot, None)
        self.in_flight -= 1
        if slot.owner is not None:
            self.owners.give_back(slot.owner)

    def _say(self, reason: Reason, now: float) -> None:
        if now - self._said_at < SAID_EVERY_SECONDS:
            return
        self._said_at = now
        logger.warning(
            "model %s: requests are refused (%s): %d in flight of %s, %d without a token, the oldest for %.1f s",
            self._model,
            reason,
            self.in_flight,
            "any number" if self._limit is None else self._limit,
            len(self._waiting),
            self.queue_age_seconds(now),
        )


class AdmissionSlot(Struct, eq=False):
    """One request's slot of its model, from its arrival to the end of its answer."""

    _model: ModelAdmission
    since: float
    owner: str | None
    _is_left: bool = False

    def begun(self, now: float) -> None:
        """Note the first token. Later calls do nothing."""
        self._model._begun(self, now)

    def leave(self) -> None:
        """Give the slot back. Later calls do nothing."""
        if not self._is_left:
            self._is_left = True
            self._model._left(self)

    def retry_after_seconds(self, now: float) -> int:
        """Return the `Retry-After` of a request that the workers refuse after all."""
        return self._model.retry_after_seconds(now)
