"""What every reasoning parser promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo.text.output import Idle, OutputEvent

__all__ = ["ReasoningParser"]


class ReasoningParser(Protocol):
    """Divides the text of one choice into what the model wrote to itself and what is for the reader.

    - What the events of all pushes and of `finish` say together depends on the whole text only, never on its cuts.
    - No input raises. No text is lost but the marks themselves and the white space that touches them.
    - A unified format has calls in it, too, and its parser emits them.
    - Certain text is emitted at once; the text held back is bounded (each parser says by what).
    """

    @property
    def is_inside(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known now."""
        ...

    @property
    def idle(self) -> Idle | None:
        """How plain text passes, as it does without changing anything here; None while the parser has to see all text."""
        ...

    def push(self, text: str) -> Sequence[OutputEvent]:
        """Parse the next piece of text, which may be empty."""
        ...

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputEvent]:
        """End the text and return what was held back. Call `finish` once; push nothing after it.

        `is_cut`: a limit ended the text.
        """
        ...
