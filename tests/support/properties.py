"""How many examples a property is tried with: a tenth of them in the suite that runs at every change, all in the long one.

What is true of every place of a text is a property, too: `some_of` gives the places, and the test has the mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from hypothesis import settings

FULL_EXAMPLES: Final = 100  # of a test that names no number of its own, as hypothesis has it
FEWEST_EXAMPLES: Final = 5
IN_TEST_ALL: Final = 0.4  # the share that `make test-all` tries


T = TypeVar("T")


def share() -> float:
    """Return which part of the examples the profile of this run has tried."""
    return settings.default.max_examples / FULL_EXAMPLES if settings.default is not None else 1.0


def some_of(cases: Sequence[T], first: int = 0, *, enough: float = 1.0) -> Sequence[T]:
    """Return all cases, or every tenth where the profile has a tenth of the examples, and so on.

    `first` shifts which ones: neighbours that are given different numbers have different places tried. `enough`: the share
    of the examples from which on all cases are tried.
    """
    step = 1 if share() >= enough else max(1, round(1 / share()))
    return cases[first % step :: step]


def examples(full: int, **more: Any) -> settings:
    """Return settings with `full` examples, fewer in proportion under a profile that has fewer than 100."""
    return settings(max_examples=max(FEWEST_EXAMPLES, round(full * share())), **more)
