"""What routes the requests of a replay: one frontend of the production system, less everything but its choice. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from dynamo.kv.events import RouterEvent
from dynamo.placement.candidates import Candidate, PlacementRequest, Policy, place
from dynamo.placement.load import Booking, LoadBook
from dynamo.placement.policies import RouterMode, policy_for
from dynamo.replay.flight import Flight


class Routed(NamedTuple):
    """A choice that is booked."""

    worker_id: int
    cached_tokens: int = 0  # of the prompt, as far as the router knows


class ReplayFrontend(Protocol):
    """Chooses workers, and gets the reports that production frontends get. Times are milliseconds."""

    reads_events: bool
    """Whether KV events change anything; where they do not, none are made."""

    def set_workers(self, worker_ids: Sequence[int]) -> None:
        """Take note of the workers that are there now."""
        ...

    def route(self, flight: Flight, now_ms: float) -> Routed | None:
        """Choose the worker of a request and book it there; None: it waits, and `ready` returns it. Raises `WorkerUnavailable` when
        there is none."""
        ...

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, Routed]]:
        """Yield the requests that have waited and go now, each of them booked."""
        ...

    def would_choose(self, flight: Flight, now_ms: float) -> int | None:
        """Return the worker that `route` would choose, without booking; None where the call would change the next choice."""
        ...

    def booked_elsewhere(self, flight: Flight, booking_id: str, routed: Routed, now_ms: float) -> None:
        """Take note of a booking of another frontend."""
        ...

    def first_token(self, booking_id: str, now_ms: float) -> None:
        """Take note of the first token of a request."""
        ...

    def end(self, booking_id: str, now_ms: float) -> None:
        """Take note of the end of a request."""
        ...

    def apply(self, event: RouterEvent, now_ms: float) -> None:
        """Take note of a change of a worker's cache."""
        ...

    def forget(self, worker_id: int) -> None:
        """Drop what is known of a worker's cache."""
        ...


MakeFrontend = Callable[[int], ReplayFrontend]
"""(seed) -> one frontend"""


class CountingFrontend:
    """Routes by a policy that counts open streams at most: round-robin, random, least-loaded, power-of-two."""

    reads_events = False

    def __init__(self, mode: RouterMode, rng: random.Random) -> None:
        self._policy: Policy = policy_for(mode, rng=rng)
        self._load = LoadBook()
        self._worker_ids: Sequence[int] = ()
        self._bookings: dict[str, Booking] = {}  # by booking id; bounded by the requests in flight

    def set_workers(self, worker_ids: Sequence[int]) -> None:
        """Take note of the workers that are there now."""
        self._worker_ids = sorted(worker_ids)

    def route(self, flight: Flight, now_ms: float) -> Routed:
        """Choose the worker of a request and book it there."""
        in_flight = self._load.in_flight
        candidates = [Candidate(worker_id, in_flight=in_flight(worker_id)) for worker_id in self._worker_ids]
        chosen = place(self._policy, _ANY, candidates, now_ms / 1000, scope="the replay").candidate.instance_id
        self._bookings[flight.booking_id] = self._load.book(chosen)
        return Routed(chosen)

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, Routed]]:
        """Return none: nothing waits."""
        return iter(())

    def would_choose(self, flight: Flight, now_ms: float) -> int | None:
        """Return None: a choice counts as a turn."""
        return None

    def booked_elsewhere(self, flight: Flight, booking_id: str, routed: Routed, now_ms: float) -> None:
        """Ignore it: these modes count the streams of their own frontend."""

    def first_token(self, booking_id: str, now_ms: float) -> None:
        """Ignore it: streams are counted until they end."""

    def end(self, booking_id: str, now_ms: float) -> None:
        """Release the booking."""
        if (booking := self._bookings.pop(booking_id, None)) is not None:
            booking.release()

    def apply(self, event: RouterEvent, now_ms: float) -> None:
        """Ignore it: nothing is known of caches."""

    def forget(self, worker_id: int) -> None:
        """Ignore it: nothing is known of caches."""


_ANY = PlacementRequest()
