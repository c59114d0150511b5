"""How much load is sent, and when. No I/O, no clock: `now` is given.

The shape of the load is one of two. Closed: each of N connections sends its next request when the last one is answered.
Open: requests are sent at their times, whether or not the server keeps up, which is how users behave.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is sent, and when. `rate` None: closed loop."""

    connections: int  # closed: how many send; open: how many may be in use at once
    requests: int | None = None  # stop after so many
    seconds: float | None = None  # send nothing new after so long
    rate: float | None = None  # requests per second
    is_even: bool = False  # the same time between requests, instead of a Poisson process
    times: tuple[float, ...] = ()  # open: seconds after the start at which requests are due, rising; in place of `rate`
    timeout_seconds: float = 600.0  # until a request is given up

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own."""
        return self.rate is not None or bool(self.times)


def arrival_times(rate: float, rng: random.Random, *, is_even: bool = False) -> Iterator[float]:
    """Seconds after the start at which requests are due, rising, for ever."""
    at = 0.0
    while True:
        yield at
        at += 1 / rate if is_even else rng.expovariate(rate)


class Schedule:
    """The progress of one run through its shape."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self.shape = shape
        self.begun = 0.0
        self.due = 0.0  # open: when the next request is due
        self.is_over = False  # nothing more is sent
        self._number = 0  # of the next request
        self._arrivals: Iterator[float] = iter(())
        if shape.times:
            self._arrivals = chain(shape.times, repeat(math.inf))
        elif shape.rate is not None:
            self._arrivals = arrival_times(shape.rate or 1.0, rng, is_even=shape.is_even)

    def begin(self, now: float) -> None:
        """Start the clock of the run."""
        self.begun = now
        if self.shape.is_open:
            self.advance()

    def may_send(self, now: float) -> bool:
        """Return whether one more request is sent; once it is not, the run is over."""
        if self.is_over:
            return False
        shape = self.shape
        self.is_over = (
            (len(shape.times) <= self._number if shape.times else False)
            or (shape.requests is not None and self._number >= shape.requests)
            or (shape.seconds is not None and now - self.begun >= shape.seconds)
        )
        return not self.is_over

    def take_number(self) -> int:
        """Return the number of the request that is sent next."""
        self._number += 1
        return self._number - 1

    @property
    def next_number(self) -> int:
        """The number of the request that is sent next."""
        return self._number

    def advance(self) -> None:
        """Open: go on to the time of the next request."""
        self.due = self.begun + next(self._arrivals)
