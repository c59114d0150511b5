"""The one shape a logits processor has, whichever engine runs it. Needs no tensor library to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["BaseLogitsProcessor"]


@runtime_checkable
class BaseLogitsProcessor(Protocol):
    """Change the logits of one position of one request. A processor with state belongs to one request only."""

    def __call__(self, input_ids: Sequence[int], logits: Any) -> None:
        """Edit `logits` (the engine's own tensor, one value per vocabulary entry) in place; return nothing.

        `input_ids` are the tokens so far.
        """
