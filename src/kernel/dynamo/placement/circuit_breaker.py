"""Which workers are left out after a failure, for how long, and which request finds out whether that is over. Pure.

Each worker has a circuit breaker in the form of one entry. Without an entry the circuit is closed. With one, it is open
until `until`. The first request after that is the probe (half-open): sending the probe sets the next `until` at once,
twice as far away as the last time, so that other requests still go elsewhere and a probe that never returns holds nothing
up. An answer removes the entry. A failure starts the entry's present time anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

LONGEST_FACTOR: Final = 12
"""The time doubles up to this many times the first one: with 5 s, a worker that came back gets its first request within a
minute. At that pace its probes cost one request a minute, and that request is retried elsewhere."""


class _OpenCircuit:
    __slots__ = ("seconds", "until")

    def __init__(self, until: float, seconds: float) -> None:
        self.until, self.seconds = until, seconds


class CircuitBreaker:
    """The workers with an open circuit, by id. Bounded by the workers there are: `reset` those that vanish."""

    __slots__ = ("_base_seconds", "_open", "open")

    def __init__(self, base_seconds: float) -> None:
        """`base_seconds`: how long a circuit stays open at first; 0 switches the breaker off."""
        self._base_seconds = base_seconds
        self._open: dict[int, _OpenCircuit] = {}
        self.open: Mapping[int, object] = self._open
        """The circuits that are open or half open, by id. Empty: there are none; every request reads this."""

    def __len__(self) -> int:
        return len(self._open)

    def __bool__(self) -> bool:
        return bool(self._open)

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def record_failure(self, instance_id: int, now: float) -> bool:
        """Open the circuit, or keep it open; return whether it was closed before.

        A hundred streams that break at once are one failure.
        """
        if self._base_seconds <= 0:
            return False
        circuit = self._open.get(instance_id)
        if circuit is None:
            self._open[instance_id] = _OpenCircuit(now + self._base_seconds, self._base_seconds)
            return True
        circuit.until = max(circuit.until, now + circuit.seconds)
        return False

    def record_request(self, instance_id: int, now: float) -> bool:
        """Record a request sent to the instance; return whether the request is a probe."""
        circuit = self._open.get(instance_id)
        if circuit is None or now < circuit.until:
            return False
        circuit.seconds = min(2 * circuit.seconds, LONGEST_FACTOR * self._base_seconds)
        circuit.until = now + circuit.seconds
        return True

    def record_answer(self, instance_id: int) -> bool:
        """Close the circuit: the worker answered. Return whether it was open."""
        return self._open.pop(instance_id, None) is not None

    def reset(self, instance_id: int) -> None:
        """Forget a worker that vanished or registered anew; an unknown id is fine."""
        self._open.pop(instance_id, None)

    def until(self) -> dict[int, float]:
        """Return when each circuit that is not closed lets the next probe through."""
        return {known: circuit.until for known, circuit in self._open.items()}

    def open_circuits(self, now: float) -> frozenset[int]:
        """Return the ids to exclude at `now`: those whose circuit is still open."""
        return frozenset([known for known, circuit in self._open.items() if now < circuit.until])
