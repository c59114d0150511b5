"""The delays before a store is contacted again."""

from __future__ import annotations

import random
from typing import Final

RETRY_SECONDS: Final = (
    0.1,
    1.0,
)  # first and longest wait while a store does not answer; each has up to half as much again


class Delays:
    """Waiting times, doubled from the first to the longest, with chance so that a cluster does not knock in step."""

    def __init__(self) -> None:
        self._next, self._longest = RETRY_SECONDS

    def __iter__(self) -> Delays:
        return self

    def __next__(self) -> float:
        delay, self._next = self._next, min(self._next * 2, self._longest)
        return delay * random.uniform(1.0, 1.5)
