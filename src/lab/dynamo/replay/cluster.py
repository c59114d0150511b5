"""Replays a trace over simulated workers in virtual time: an event loop over a heap of times. Pure.

Nothing waits: the loop jumps from the arrival of a request to the end of a pass and so on, and the same trace, setup and
seed give the same figures to the last digit. Workers take their passes as the mock engine does. Frontends learn what
production frontends learn, and when they learn it: KV events after the pass that brought them (and `kv_event_lag_ms`
later), first tokens and ends with the answers, bookings of other frontends through replica sync.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dynamo.errors import WorkerUnavailable
from dynamo.replay.figures import GapCounts
from dynamo.replay.fleet import Fleet
from dynamo.replay.flight import Flight
from dynamo.replay.frontends import Entrances, MakeFrontend
from dynamo.replay.setup import ReplaySetup, Restart, Throttle
from dynamo.replay.trace import StretchTree, Trace, TraceRequest
from dynamo.replay.worker import MakeCore, ReplayWorker

# When the requests of a trace are sent: at their times, or when others have ended. Pure.


class Arrivals:
    """When the requests of a trace are sent."""

    def __init__(self, trace: Trace, setup: ReplaySetup) -> None:
        self._is_closed = setup.concurrency is not None
        self._ratio = setup.arrival_speedup_ratio
        self._room = setup.concurrency or 0
        self._timed: deque[TraceRequest] = deque()
        self._turns: dict[str, deque[TraceRequest]] = {}
        for request in trace.requests:
            if request.delay_ms is not None and request.session_id is not None:
                self._turns.setdefault(request.session_id, deque()).append(request)
            else:
                self._timed.append(request)
        self._begin_ms = self._timed[0].arrival_ms if self._timed else 0.0
        self._length_ms = self._timed[-1].arrival_ms - self._begin_ms if self._timed else 0.0

    def time_of(self, share: float) -> float:
        """Return when a share of the trace has passed."""
        return share * self._length_ms / self._ratio

    def next(self, now_ms: float) -> tuple[float, TraceRequest] | None:
        """Return the next request with the time that it is due; None: nothing is due until something ends."""
        if not self._timed or (self._is_closed and not self._room):
            return None
        request = self._timed.popleft()
        if self._is_closed:
            self._room -= 1
            return now_ms, request
        return (request.arrival_ms - self._begin_ms) / self._ratio, request

    def after(self, ended: TraceRequest, now_ms: float) -> Sequence[tuple[float, TraceRequest]]:
        """Return what becomes due because a request has ended: the next turn of its session, the next of a closed loop."""
        due: list[tuple[float, TraceRequest]] = []
        turns = self._turns.get(ended.session_id) if ended.session_id is not None else None
        if turns:
            request = turns.popleft()
            due.append((now_ms + (request.delay_ms or 0.0) / self._ratio, request))
        elif self._is_closed:
            self._room += 1
            if (found := self.next(now_ms)) is not None:
                due.append(found)
        return due


EXACTNESS_CHECK_MS: Final = 10.0
# Of things that happen at one time, requests and ends of passes come first: a pass that begins then sees them all.
_AT_ONCE, _PASS = 0, 1


class Agenda:
    """Calls at their times, each with the time that it then is. No clock: time goes from one call to the next."""

    __slots__ = ("_heap", "_serial", "now_ms")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._serial = 0
        self.now_ms = 0.0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def has_more_now(self) -> bool:
        """Whether something else happens at this very time."""
        return bool(self._heap) and self._heap[0][0] <= self.now_ms

    def schedule(self, delay_ms: float, call: Callable[[float], None], order: int = _AT_ONCE) -> None:
        """Call back after a time."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, order, self._serial, call))

    def run(self) -> None:
        """Make all calls, also those that are scheduled by them."""
        heap = self._heap
        while heap:
            self.now_ms, _, _, call = heapq.heappop(heap)
            call(self.now_ms)


class ReplayCluster:
    """One replay. Make it, `run` it once, read what its lists hold."""

    def __init__(
        self, trace: Trace, setup: ReplaySetup, tree: StretchTree, make_core: MakeCore, make_frontend: MakeFrontend
    ) -> None:
        """`tree` hashes the prompts; replays of one trace may share it."""
        setup.check()
        self.setup = setup
        self.flights: list[Flight] = []  # in the order of arrival
        self.gaps = GapCounts()
        self.fleet = Fleet(setup, make_core)
        self._agenda = Agenda()
        self.entrances = Entrances(setup, make_frontend, self._agenda.schedule)
        self._tree = tree
        self._arrivals = Arrivals(trace, setup)
        self.exact_after_ms: float | None = None

    def run(self) -> None:
        """Replay the whole trace. Afterwards every request has ended."""
        for worker in self.fleet.workers:
            self.entrances.join(worker)
        self.entrances.set_workers(self.fleet.ids)
        for restart in self.setup.restarts:
            self._agenda.schedule(self._arrivals.time_of(restart.at), partial(self._restart, restart))
        for throttle in self.setup.throttles:
            self._agenda.schedule(self._arrivals.time_of(throttle.at), partial(self._throttle, throttle))
        self._await_arrival()
        self._agenda.run()

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _await_arrival(self) -> None:
        """Schedule the next request whose time is in the trace."""
        while (found := self._arrivals.next(self._agenda.now_ms)) is not None:
            at_ms, request = found
            self._agenda.schedule(at_ms - self._agenda.now_ms, partial(self._arrive, request))
            if self.setup.concurrency is None:
                return

    def _arrive(self, request: TraceRequest, now_ms: float) -> None:
        if self.setup.concurrency is None:
            self._await_arrival()
        frontend = len(self.flights) % self.setup.frontends
        flight = Flight(request, self._tree.blocks(request.prompt), frontend, now_ms)
        self.flights.append(flight)
        self._dispatch(flight, now_ms)

    def _dispatch(self, flight: Flight, now_ms: float) -> None:
        try:
            worker_id = self.entrances.route(flight, now_ms)
        except WorkerUnavailable:
            self._ended(flight, "failed", now_ms)
            return
        if worker_id is not None:
            self._send(flight, worker_id, now_ms)

    def _send(self, flight: Flight, worker_id: int, now_ms: float) -> None:
        worker = self.fleet.by_id[worker_id]
        flight.worker = worker.number
        worker.submit(flight, now_ms)
        if not worker.is_in_pass:
            self._begin_soon(worker)

    def _send_ready(self, now_ms: float) -> None:
        """Send what has waited for its turn; loads have fallen."""
        for flight, worker_id in self.entrances.ready(now_ms):
            self._send(flight, worker_id, now_ms)

    def _ended(self, flight: Flight, status: str, now_ms: float) -> None:
        flight.status = status
        for at_ms, request in self._arrivals.after(flight.request, now_ms):
            self._agenda.schedule(at_ms - now_ms, partial(self._arrive, request))

    # -- passes ------------------------------------------------------------------------------------------------------------

    def _begin_soon(self, worker: ReplayWorker) -> None:
        """Begin a pass once everything of this moment has happened."""
        worker.is_in_pass = True
        if self._agenda.has_more_now:
            self._agenda.schedule(0.0, partial(self._begin, worker), _PASS)
        else:
            self._begin(worker, self._agenda.now_ms)

    def _begin(self, worker: ReplayWorker, now_ms: float) -> None:
        duration_ms = worker.begin_pass(now_ms)
        if duration_ms is None:
            worker.is_in_pass = False
        else:
            self._agenda.schedule(duration_ms, partial(self._end, worker))

    def _end(self, worker: ReplayWorker, now_ms: float) -> None:
        if worker.worker_id not in self.fleet.by_id:
            return  # it was lost in the middle of the pass
        result = worker.end_pass()
        gaps = self.gaps
        for scheduled in result.emitted:
            flight = scheduled.owner
            assert isinstance(flight, Flight)
            times = flight.times
            if flight.tokens:
                if times.second < 0:
                    times.second = now_ms
                gaps.add(now_ms - times.last)
            else:
                times.first = now_ms
                times.admitted = scheduled.admitted_ms
                flight.reused_tokens = scheduled.cached_tokens
            times.last = now_ms
            flight.tokens += scheduled.burst
        entrances = self.entrances
        if result.events and entrances.reads_events:
            entrances.publish(worker, worker.router_events(result), now_ms)
        for scheduled in result.first:
            assert isinstance(scheduled.owner, Flight)
            entrances.first_token(scheduled.owner, now_ms)
        for status, ended in (("finished", result.finished), ("rejected", result.rejected)):
            for scheduled in ended:
                flight = scheduled.owner
                assert isinstance(flight, Flight)
                del worker.flights[flight]
                entrances.end(flight, now_ms)
                self._ended(flight, status, now_ms)
        if result.first or result.finished or result.rejected:
            worker.is_in_pass = True  # its next pass begins below, with what is sent now
            self._send_ready(now_ms)
        self._begin_soon(worker)

    # -- restarts ------------------------------------------------------------------------------------------------------------

    def _throttle(self, throttle: Throttle, now_ms: float) -> None:
        self.fleet.speeds[throttle.number].factor = throttle.speed

    def _restart(self, restart: Restart, now_ms: float) -> None:
        if restart.what == "worker":
            self._lose_worker(self.fleet.workers[restart.number % self.setup.workers], restart, now_ms)
        else:
            self.entrances.restart(restart.number % self.setup.frontends, self.fleet)
            self._watch_exactness(now_ms, now_ms)

    def _lose_worker(self, worker: ReplayWorker, restart: Restart, now_ms: float) -> None:
        """End a worker; its requests go on at others, and an empty one takes its place later."""
        self.fleet.remove(worker)
        self.entrances.leave(worker)
        self.entrances.set_workers(self.fleet.ids)
        for flight in list(worker.flights):
            self.entrances.end(flight, now_ms)
            flight.moves += 1
            self._dispatch(flight, now_ms)
        self._send_ready(now_ms)
        self._agenda.schedule(restart.down_ms, partial(self._replace, worker))

    def _replace(self, lost: ReplayWorker, now_ms: float) -> None:
        worker = self.fleet.replace(lost)
        self.entrances.join(worker)
        self.entrances.set_workers(self.fleet.ids)
        self._watch_exactness(now_ms, now_ms)

    def _watch_exactness(self, since_ms: float, now_ms: float) -> None:
        """Check again and again whether every index is true, and keep the longest time that it took."""
        if self.entrances.is_exact:
            self.exact_after_ms = max(self.exact_after_ms or 0.0, now_ms - since_ms)
        elif self._agenda:
            self._agenda.schedule(EXACTNESS_CHECK_MS, partial(self._watch_exactness, since_ms))
