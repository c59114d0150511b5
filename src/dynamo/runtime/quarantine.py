"""Who is left out after a failure, for how long, and who finds out whether it is over. No I/O: time is an argument.

A circuit breaker for each instance, in the form of one entry: absent, the instance is well. Otherwise nobody is sent there
until `until`. The first request after that is the probe: sending it sets the next `until` at once, twice as far away as
the last time, so that the others still go elsewhere and a probe that never returns holds nothing up. An answer removes the
entry; a failure lets the time, as it is now, begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["LONGEST_FACTOR", "Quarantine"]

LONGEST_FACTOR: Final = 12
"""The time doubles up to this many times the first one: with 5 s, a worker that came back gets its first request within a
minute. At that pace its probes cost one request a minute, and that one goes on elsewhere."""


class _Sentence:
    __slots__ = ("seconds", "until")

    def __init__(self, until: float, seconds: float) -> None:
        self.until, self.seconds = until, seconds


class Quarantine:
    """The instances that failed, by id. Bounded by the instances there are: `forgive` those that vanish."""

    __slots__ = ("_base_seconds", "_sentences")

    def __init__(self, base_seconds: float) -> None:
        """`base_seconds`: how long the first time is; 0 switches all of it off."""
        self._base_seconds = base_seconds
        self._sentences: dict[int, _Sentence] = {}

    def __len__(self) -> int:
        return len(self._sentences)

    def __bool__(self) -> bool:
        return bool(self._sentences)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sentences)

    def failed(self, instance_id: int, now: float) -> bool:
        """A request to it was lost; whether that is news. A hundred streams that break at once are one failure."""
        if self._base_seconds <= 0:
            return False
        sentence = self._sentences.get(instance_id)
        if sentence is None:
            self._sentences[instance_id] = _Sentence(now + self._base_seconds, self._base_seconds)
            return True
        sentence.until = max(sentence.until, now + sentence.seconds)
        return False

    def sent(self, instance_id: int, now: float) -> bool:
        """A request goes there; whether it is a probe."""
        sentence = self._sentences.get(instance_id)
        if sentence is None or now < sentence.until:
            return False
        sentence.seconds = min(2 * sentence.seconds, LONGEST_FACTOR * self._base_seconds)
        sentence.until = now + sentence.seconds
        return True

    def answered(self, instance_id: int) -> bool:
        """It said something; whether that ended a quarantine."""
        return self._sentences.pop(instance_id, None) is not None

    def forgive(self, instance_id: int) -> None:
        """It vanished, or appeared anew; absent is fine."""
        self._sentences.pop(instance_id, None)

    def shut_out(self, now: float) -> frozenset[int]:
        """Who is to be left out just now: those whose time is not over."""
        return frozenset([known for known, sentence in self._sentences.items() if now < sentence.until])
