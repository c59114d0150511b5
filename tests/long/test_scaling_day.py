"""A simulated day: what scaled workers cost, beside the best fixed number of them, at the same time to first token."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from dynamo.scaling.decide import ScaleReason, ScaleRules
from dynamo.scaling.follower import RoleLoad, ScaleFollower, saturation_of

pytestmark = pytest.mark.process  # it takes some seconds

DAY_SECONDS = 86_400
PLACES = 8  # requests that a worker runs at once
SERVICE_SECONDS = 6.0  # of a request, on average
START_SECONDS = 30.0
PREFILL_SECONDS = 0.2
TARGET_TTFT_SECONDS = 2.0  # p99


@dataclass(slots=True)
class Worker:
    running: int = 0
    is_leaving: bool = False


@dataclass(slots=True)
class Day:
    """What came of one day."""

    worker_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    most: int = 0
    changes: int = 0

    @property
    def ttft_p99_seconds(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.99)] + PREFILL_SECONDS


def rate_at(second: int) -> float:
    """Requests per second: a quiet night, a morning that rises within an hour, a busy afternoon, and two bursts."""
    hour = second / 3600
    base = 0.6 + 5.4 * math.exp(-(((hour - 14.5) / 3.5) ** 2)) + 2.0 / (1 + math.exp(-(hour - 8.0) * 4))
    burst = 1.6 if 10.0 <= hour < 10.25 or 17.0 <= hour < 17.5 else 1.0
    return base * burst if hour < 21 else base * 0.5


def arrivals(seed: int) -> list[tuple[float, float]]:
    """(time, service time) of every request; those of a second are spread over it as chance has it."""
    rng = random.Random(seed)
    found = []
    for second in range(DAY_SECONDS):
        at, rate = float(second), rate_at(second)
        while (at := at + rng.expovariate(rate)) < second + 1:
            found.append((at, rng.expovariate(1 / SERVICE_SECONDS)))
    return found


def live_through(requests: list[tuple[float, float]], follower: ScaleFollower | None, workers: int) -> Day:
    """Serve the requests by so many workers, or by as many as `follower` decides; first come, first served."""
    day, fleet, starting = Day(), [Worker() for _ in range(workers)], list[float]()
    ends: list[tuple[float, int, Worker]] = []
    queue: deque[tuple[float, float]] = deque()
    position = 0
    number = 0

    def serve(now: float) -> None:
        nonlocal number
        while queue:
            free = min((each for each in fleet if not each.is_leaving), key=lambda each: each.running, default=None)
            if free is None or free.running >= PLACES:
                return
            came, service = queue.popleft()
            day.waits.append(now - came)
            free.running += 1
            number += 1
            heapq.heappush(ends, (now + service, number, free))

    for second in range(1, DAY_SECONDS + 1):
        while True:
            next_end = ends[0][0] if ends else math.inf
            next_arrival = requests[position][0] if position < len(requests) else math.inf
            now = min(next_end, next_arrival)
            if now >= second:
                break
            if next_end <= next_arrival:
                heapq.heappop(ends)[2].running -= 1
            else:
                queue.append(requests[position])
                position += 1
            serve(now)
        fleet = [each for each in fleet if each.running or not each.is_leaving]
        while starting and starting[0] <= second:
            starting.pop(0)
            fleet.append(Worker())
            serve(second)
        day.worker_seconds += len(fleet) + len(starting)
        day.most = max(day.most, len(fleet))
        if follower is None:
            continue
        ready = [each for each in fleet if not each.is_leaving]
        running = sum(each.running for each in ready) + len(queue)
        age = second - queue[0][0] if queue else 0.0
        load = RoleLoad(len(ready), running, PLACES * len(ready), len(queue), age)
        follower.sample(saturation_of(load).value * len(ready), second)
        found = follower.decide(len(ready), second)
        assert found.reason is not ScaleReason.ABOVE_MAXIMUM
        if found.target != follower.aimed:
            day.changes += 1
        starting += [second + START_SECONDS] * (found.target - follower.aimed)
        for _ in range(follower.aimed - found.target):
            min(ready, key=lambda each: each.running).is_leaving = True
        follower.aim(found.target, second)
    return day


def test_a_day_costs_less_than_the_best_fixed_number_of_workers() -> None:
    requests = arrivals(0)
    fixed = next(
        (workers, day)
        for workers in range(6, 20)
        if (day := live_through(requests, None, workers)).ttft_p99_seconds <= TARGET_TTFT_SECONDS
    )
    follower = ScaleFollower(ScaleRules(min_workers=1, max_workers=20), 2)
    follower.started(START_SECONDS)
    scaled = live_through(requests, follower, 2)
    cost = scaled.worker_seconds / fixed[1].worker_seconds
    print(
        f"{len(requests)} requests; {fixed[0]} fixed workers: p99 {fixed[1].ttft_p99_seconds:.2f} s; scaled: at most "
        f"{scaled.most}, {scaled.changes} changes, p99 {scaled.ttft_p99_seconds:.2f} s, {cost:.2f} of the worker-seconds"
    )
    assert len(scaled.waits) >= len(requests) - 200
    assert scaled.ttft_p99_seconds <= TARGET_TTFT_SECONDS
    assert cost <= 1.15
