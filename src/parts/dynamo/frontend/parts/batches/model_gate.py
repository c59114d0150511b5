"""How many lines of batches a model gets at once: so many that requests of people wait no longer because of them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dynamo.frontend.admission.model import ModelAdmission

FIRST_LINES: Final = 4  # at once, before anything is known of a model
UNKNOWN_CAPACITY: Final = 16  # lines at once at a worker that does not report what it runs at once
KEPT_FREE: Final = 8  # one place of so many of the workers' is left to others
FIRST_HOLD_SECONDS: Final = 1.0
MAX_HOLD_SECONDS: Final = 30.0
MAX_MODELS: Final = 1000


class ModelGate:
    """Additive increase, multiplicative decrease, below what the workers run at once; shut for a while after a refusal."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` returns a factor for each hold, so that several models do not come back at one moment."""
        self._jitter = jitter
        self._limit = float(FIRST_LINES)
        self._is_growing_fast = True  # doubling, until the first refusal
        self._hold_seconds = FIRST_HOLD_SECONDS
        self.held_until = 0.0
        self.in_flight = 0

    def enter(self, now: float, admission: ModelAdmission | None, workers: int) -> bool:
        """Take a place for one line, if there is one. `admission`: None where the model is not served now."""
        if now < self.held_until or self.in_flight >= self._limit:
            return False
        if admission is not None:
            # The others' requests are in there, too: while there are many of them, there are few lines.
            room = admission.capacity
            room = UNKNOWN_CAPACITY * max(1, workers) if room is None else room
            if admission.in_flight and admission.in_flight >= max(1, room - room // KEPT_FREE):
                return False
        elif self.in_flight:
            return False  # one line finds out whether the model is back
        self.in_flight += 1
        return True

    def answered(self) -> None:
        """Note a line that a worker answered."""
        self.in_flight -= 1
        self._hold_seconds = FIRST_HOLD_SECONDS
        self._limit += 1.0 if self._is_growing_fast else 1.0 / max(1.0, self._limit)

    def refused(self, now: float, retry_after_seconds: float | None) -> None:
        """Note a line that no worker had room for, and keep others away for a while."""
        self.in_flight -= 1
        self._is_growing_fast = False
        if now < self.held_until:
            return  # one of several that were under way
        self._limit = max(1.0, self._limit / 2)
        self.held_until = now + max(self._hold_seconds * self._jitter(), retry_after_seconds or 0.0)
        self._hold_seconds = min(MAX_HOLD_SECONDS, 2 * self._hold_seconds)

    def left(self) -> None:
        """Note a line that ended without any news of the model."""
        self.in_flight -= 1


class ModelGates:
    """The gates of the models that lines name; the one that was used longest ago is forgotten first."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = random.Random() if rng is None else rng
        self._gates: OrderedDict[str, ModelGate] = OrderedDict()

    def of(self, model: str) -> ModelGate:
        """Return the gate of a model."""
        gate = self._gates.get(model)
        if gate is None:
            gate = self._gates[model] = ModelGate(lambda: self._rng.uniform(0.75, 1.25))
            self._forget()
        self._gates.move_to_end(model)
        return gate

    def _forget(self) -> None:
        if len(self._gates) > MAX_MODELS:
            idle = next((name for name, gate in self._gates.items() if not gate.in_flight), None)
            if idle is not None:
                del self._gates[idle]
