"""What every reasoning parser promises."""

from __future__ import annotations

from typing import Protocol

from dynamo.text.output import Content, Reasoning

__all__ = ["ReasoningParser"]


class ReasoningParser(Protocol):
    """Divides the text of one choice into what the model wrote to itself and what is for the reader.

    - What the events of all pushes and of `finish` say together depends on the whole text only, never on its cuts.
    - No input raises. No text is lost but the marks themselves and the white space that touches them.
    - Certain text is emitted at once; the text held back is bounded (each parser says by what).
    """

    @property
    def is_inside(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known now."""
        ...

    def push(self, text: str) -> list[Content | Reasoning]:
        """Parse the next piece of text, which may be empty."""
        ...

    def finish(self) -> list[Content | Reasoning]:
        """End the text and return what was held back. Call `finish` once; push nothing after it."""
        ...
