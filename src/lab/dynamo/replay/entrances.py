"""The frontends of a replay, each with its feed of KV events, and what they report to each other. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from dynamo.kv.events import RouterEvent
from dynamo.replay.event_feed import ReplayEventFeed, Schedule
from dynamo.replay.fleet import Fleet
from dynamo.replay.flight import Flight
from dynamo.replay.frontend import MakeFrontend, ReplayFrontend
from dynamo.replay.setup import ReplaySetup
from dynamo.replay.worker import ReplayWorker


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

    def route(self, flight: Flight, now_ms: float) -> int:
        """Let the request's own frontend choose, and report the booking to the others."""
        own = self.feeds[flight.frontend].frontend
        would: list[int | None] = []
        if self._setup.compares_frontends:
            would = [feed.frontend.would_choose(flight, now_ms) for feed in self.feeds if feed.frontend is not own]
        routed = own.route(flight, now_ms)
        self.compared += sum(choice is not None for choice in would)
        self.agreed += sum(choice == routed.worker_id for choice in would)
        booking_id = flight.booking_id
        self._sync(own, lambda other, then_ms: other.booked_elsewhere(flight, booking_id, routed, then_ms))
        return routed.worker_id

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
