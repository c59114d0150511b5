"""The frontends of a replay: what routes its requests, each with its feed of KV events, and what they report to each other. Pure.

A frontend is one of the production system, less everything but its choice.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from dynamo.kv.events import RouterEvent
from dynamo.placement.candidates import Candidate, PlacementRequest, Policy, place
from dynamo.placement.load import Booking, LoadBook
from dynamo.placement.policies import RouterMode, policy_for
from dynamo.replay.fleet import Fleet
from dynamo.replay.flight import Flight
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.worker import ReplayWorker


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


# The way of KV events to one frontend of a replay: late, lost, requested again. Pure.
#
# It keeps the rules of the production feed. Events of a worker are applied in their order. A number that is too high is a gap:
# missing events are requested, and live events wait for the answer. A worker that has dropped the events answers with
# everything that it holds.

MAX_WAITING: Final = 1024  # live events of one worker that wait for an answer

Schedule = Callable[[float, Callable[[float], None]], None]
"""(delay in ms, what to call with the time then)"""


class _Source:
    """One worker's events."""

    __slots__ = ("is_asking", "next_id", "waiting", "worker")

    def __init__(self, worker: ReplayWorker) -> None:
        self.worker = worker
        self.next_id = 0  # 0: everything is requested
        self.is_asking = False
        self.waiting: deque[RouterEvent] = deque(maxlen=MAX_WAITING)


class ReplayEventFeed:
    """Feeds one frontend with the events of all workers."""

    def __init__(
        self, frontend: ReplayFrontend, schedule: Schedule, *, loss: float, answer_ms: float, rng: random.Random
    ) -> None:
        """`loss` is the share of events that never arrive; an answer of a worker takes `answer_ms`."""
        self.frontend = frontend
        self._schedule = schedule
        self._loss = loss
        self._answer_ms = answer_ms
        self._rng = rng
        self._sources: dict[int, _Source] = {}
        self.lost = 0
        self.repairs = 0

    @property
    def is_exact(self) -> bool:
        """Whether every event that the workers have published so far was applied."""
        return all(
            not source.is_asking and source.next_id == source.worker.journal.last_event_id + 1
            for source in self._sources.values()
        )

    def join(self, worker: ReplayWorker) -> None:
        """Follow a worker; one that has published something gets a request for what it holds."""
        source = self._sources[worker.worker_id] = _Source(worker)
        if worker.journal.last_event_id:
            self._request(source)
        else:
            source.next_id = 1

    def leave(self, worker: ReplayWorker) -> None:
        """Forget a worker and its blocks."""
        if self._sources.pop(worker.worker_id, None) is not None:
            self.frontend.forget(worker.worker_id)

    def deliver(self, worker_id: int, events: list[RouterEvent], now_ms: float) -> None:
        """Take what a worker has just published."""
        source = self._sources.get(worker_id)
        if source is None:
            return  # it left while the events were on their way
        for event in events:
            if self._loss and self._rng.random() < self._loss:
                self.lost += 1
            else:
                self._take(source, event, now_ms)

    def _take(self, source: _Source, event: RouterEvent, now_ms: float) -> None:
        if source.is_asking:
            source.waiting.append(event)
            return
        event_id = event.event.event_id
        if event_id < source.next_id:
            return
        if event_id > source.next_id:
            source.waiting.append(event)
            self._request(source)
            return
        source.next_id = event_id + 1
        self.frontend.apply(event, now_ms)

    def _request(self, source: _Source) -> None:
        self.repairs += 1
        source.is_asking = True
        self._schedule(self._answer_ms, partial(self._answered, source))

    def _answered(self, source: _Source, now_ms: float) -> None:
        worker = source.worker
        if self._sources.get(worker.worker_id) is not source:
            return  # it left before it answered
        frontend = self.frontend
        missed = worker.journal.events_since(source.next_id) if source.next_id else None
        if missed is None:
            frontend.forget(worker.worker_id)
            missed = list(worker.journal.dump())
        for event in missed:
            frontend.apply(event, now_ms)
        source.next_id = worker.journal.last_event_id + 1
        source.is_asking = False
        while source.waiting and not source.is_asking:
            self._take(source, source.waiting.popleft(), now_ms)


class Entrances:
    """The frontends, each with its own feed of events, and what they report to each other."""

    def __init__(self, setup: ReplaySetup, make_frontend: MakeFrontend, schedule: Schedule) -> None:
        self._setup = setup
        self._make_frontend = make_frontend
        self._schedule = schedule
        self._starts = 0
        self.feeds = [self._start() for _ in range(setup.frontends)]
        self.reads_events = setup.publishes_events and any(feed.frontend.reads_events for feed in self.feeds)
        self.compared = self.agreed = 0

    def _start(self) -> ReplayEventFeed:
        setup = self._setup
        seed = (setup.seed << 20) + self._starts
        self._starts += 1
        return ReplayEventFeed(
            self._make_frontend(seed),
            self._schedule,
            loss=setup.event_loss,
            answer_ms=setup.answer_ms,
            rng=random.Random(f"{seed} events"),
        )

    @property
    def is_exact(self) -> bool:
        """Whether every frontend has every event."""
        return all(feed.is_exact for feed in self.feeds)

    def join(self, worker: ReplayWorker) -> None:
        """Report a new worker to every frontend."""
        for feed in self.feeds:
            feed.join(worker)

    def leave(self, worker: ReplayWorker) -> None:
        """Report to every frontend that a worker is gone."""
        for feed in self.feeds:
            feed.leave(worker)

    def set_workers(self, worker_ids: Sequence[int]) -> None:
        """Report the present workers to every frontend."""
        for feed in self.feeds:
            feed.frontend.set_workers(worker_ids)

    def restart(self, number: int, fleet: Fleet) -> None:
        """Replace one frontend's router by an empty one; its streams go on."""
        feed = self.feeds[number] = self._start()
        feed.frontend.set_workers(fleet.ids)
        for worker in fleet.by_id.values():
            feed.join(worker)

    def route(self, flight: Flight, now_ms: float) -> int | None:
        """Let the request's own frontend choose, and report the booking to the others; None: the request waits."""
        own = self.feeds[flight.frontend].frontend
        would: list[int | None] = []
        if self._setup.compares_frontends:
            would = [feed.frontend.would_choose(flight, now_ms) for feed in self.feeds if feed.frontend is not own]
        routed = own.route(flight, now_ms)
        if routed is None:
            return None
        self.compared += sum(choice is not None for choice in would)
        self.agreed += sum(choice == routed.worker_id for choice in would)
        self._share(flight, routed)
        return routed.worker_id

    def ready(self, now_ms: float) -> Iterator[tuple[Flight, int]]:
        """Yield the requests that have waited and go now, with their workers."""
        for feed in self.feeds:
            for flight, routed in feed.frontend.ready(now_ms):
                self._share(flight, routed)
                yield flight, routed.worker_id

    def _share(self, flight: Flight, routed: Routed) -> None:
        own, booking_id = self.feeds[flight.frontend].frontend, flight.booking_id
        self._sync(own, lambda other, then_ms: other.booked_elsewhere(flight, booking_id, routed, then_ms))

    def first_token(self, flight: Flight, now_ms: float) -> None:
        """Report a first token to the frontends."""
        own, booking_id = self.feeds[flight.frontend].frontend, flight.booking_id
        own.first_token(booking_id, now_ms)
        self._sync(own, lambda other, then_ms: other.first_token(booking_id, then_ms))

    def end(self, flight: Flight, now_ms: float) -> None:
        """Report the end of a request, or of a try, to the frontends."""
        own, booking_id = self.feeds[flight.frontend].frontend, flight.booking_id
        own.end(booking_id, now_ms)
        self._sync(own, lambda other, then_ms: other.end(booking_id, then_ms))

    def _sync(self, own: ReplayFrontend, report: Callable[[ReplayFrontend, float], None]) -> None:
        """Report something to every other frontend, as late as in production."""
        delay_ms = self._setup.replica_sync_ms
        if delay_ms is None or len(self.feeds) == 1:
            return
        for feed in self.feeds:
            if feed.frontend is not own:
                self._schedule(delay_ms, partial(report, feed.frontend))

    def publish(self, worker: ReplayWorker, events: list[RouterEvent], now_ms: float) -> None:
        """Send the events of a worker to every frontend."""
        lag_ms = self._setup.kv_event_lag_ms
        for feed in self.feeds:
            if lag_ms:
                self._schedule(lag_ms, partial(feed.deliver, worker.worker_id, events))
            else:
                feed.deliver(worker.worker_id, events, now_ms)
