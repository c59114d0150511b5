"""How many examples a property is tried with: all of them, or a tenth in the suite that runs at every change."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import settings

FULL_EXAMPLES: Final = 100  # of a test that names no number of its own, as hypothesis has it
FEWEST_EXAMPLES: Final = 5


def examples(full: int, **more: Any) -> settings:
    """Return settings with `full` examples, fewer in proportion under a profile that has fewer than 100."""
    share = settings.default.max_examples / FULL_EXAMPLES if settings.default is not None else 1.0
    return settings(max_examples=max(FEWEST_EXAMPLES, round(full * share)), **more)
