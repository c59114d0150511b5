"""What one rendering of a chat template may take: steps, sizes and time, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from dynamo.settings.readers import integer, mebibytes
from dynamo.settings.readers import seconds as cpu_seconds
from dynamo.settings.table import setting

T = TypeVar("T")
STEPS_PER_LOOK: Final = 64  # at the clock, which costs a system call
MAX_NESTING: Final = 64  # containers that the template itself puts into each other
ITEM_BYTES: Final = 16  # a list's item, beside what it holds


def NO_CLOCK() -> float:
    """Stand for a clock where time is not real."""
    return 0.0


class BudgetExceeded(Exception):
    """A template used up one of its bounds; `limit` is its name in `BudgetSpec`."""

    def __init__(self, limit: str, bound: float) -> None:
        what = {"steps": "steps", "sizes": "bytes of text and lists", "seconds": "s"}[limit]
        super().__init__(f"it takes more than {bound:g} {what}")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """What one rendering may take."""

    # fmt: off
    steps: int = setting(1_000_000, "DYN_TEMPLATE_MAX_STEPS", integer(1), "Passes of loops, and calls")
    sizes: int = setting(256 * 1024 * 1024, "DYN_TEMPLATE_MAX_MB", mebibytes,
        "Everything that the template makes, its prompt included")
    seconds: float = setting(2.0, "DYN_TEMPLATE_SECS", cpu_seconds(0.001), "CPU time")
    # fmt: on


class RenderingBudget:
    """What is left of one rendering's bounds."""

    __slots__ = ("_clock", "_deadline", "_spec", "sizes", "steps", "weights")

    def __init__(self, spec: BudgetSpec, clock: Callable[[], float]) -> None:
        self._spec, self._clock = spec, clock
        self.steps, self.sizes = spec.steps, spec.sizes
        # Set at the first check: a clock of CPU time is a system call, and most renderings end before they need one.
        self._deadline: float | None = None
        # By id: (the container, its size when written out, how deep it nests). Lists may hold one another twice, and so
        # be exponentially long when written out.
        self.weights: dict[int, tuple[object, int, int]] = {}

    def step(self) -> None:
        """Count one step."""
        self.steps -= 1
        if not self.steps % STEPS_PER_LOOK:
            self.look()

    def look(self) -> None:
        """End the rendering when its steps or its time are over."""
        if self.steps <= 0:
            raise BudgetExceeded("steps", self._spec.steps)
        now = self._clock()
        if self._deadline is None:
            self._deadline = now + self._spec.seconds
        elif now > self._deadline:
            raise BudgetExceeded("seconds", self._spec.seconds)

    def spend(self, size: int) -> None:
        """Pay for a value before or just after it is made."""
        self.sizes -= size
        if self.sizes < 0:
            raise BudgetExceeded("sizes", self._spec.sizes)
        if size > 65_536:
            self.look()

    def made(self, value: T) -> T:
        """Pay for a value that the template made, and remember the size of a container."""
        kind = value.__class__
        if kind is str:
            self.spend(len(value))  # type: ignore[arg-type]
        elif kind is list or kind is tuple or kind is dict:
            self.spend(self._weigh(value)[0])  # type: ignore[arg-type]
        return value

    def text_of(self, value: object) -> int:
        """Return how long a value is when written out, roughly.

        What the request brought is a tree and not examined: what is made of it is paid for afterwards.
        """
        if value.__class__ is str:
            return len(value)
        known = self.weights.get(id(value))
        return known[1] if known is not None and known[0] is value else ITEM_BYTES

    def _weigh(self, value: Iterable[object]) -> tuple[int, int]:
        """Return (size, nesting) of a container; visits each nested container once."""
        known = self.weights.get(id(value))
        if known is not None and known[0] is value:
            return known[1], known[2]
        size, depth = ITEM_BYTES, 0
        for item in items_of(value):
            kind = item.__class__
            size += ITEM_BYTES
            if kind is str:
                size += len(item)  # type: ignore[arg-type]
            elif kind is list or kind is tuple or kind is dict:
                inner, nested = self._weigh(item)  # type: ignore[arg-type]
                size, depth = size + inner, max(depth, nested)
            if size > self._spec.sizes:
                raise BudgetExceeded("sizes", self._spec.sizes)
        if depth >= 4 * MAX_NESTING:
            raise BudgetExceeded("sizes", self._spec.sizes)
        self.weights[id(value)] = (value, size, depth + 1)
        return size, depth + 1


def items_of(value: Iterable[object]) -> Iterator[object]:
    """Return what a container holds, the keys of a dict too."""
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    else:
        yield from value
