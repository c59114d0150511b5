"""What every tool-call parser promises."""

from __future__ import annotations

from typing import Protocol

from dynamo.text.output import Idle, OutputEvent

__all__ = ["ToolParser"]


class ToolParser(Protocol):
    """Finds the tool calls in the content of one choice (its reasoning has been taken out).

    - What the events of all pushes and of `finish` say together depends on the whole text only, never on its cuts.
    - No input raises. What turns out to be no call is content, character for character; of what is a call only its
      marks and the white space that touches them are left out.
    - Plain text is emitted at once, a call as it comes. One that breaks or is cut off when it has been told in part is
      taken back with `CallDropped`, which has its text. The text held back is bounded (each parser says by what).
    """

    @property
    def idle(self) -> Idle | None:
        """How plain text passes, as it does without changing anything here; None while the parser has to see all text."""
        ...

    def push(self, text: str) -> list[OutputEvent]:
        """Parse the next piece of text, which may be empty."""
        ...

    def finish(self, *, keeps_cut_call: bool = False, is_cut: bool = False) -> list[OutputEvent]:
        """End the text and return what was held back. Call `finish` once; push nothing after it.

        `keeps_cut_call`: a call had to come, so what there is of one that was cut off is that call and no content.
        `is_cut`: a limit ended the text, so a call is complete only if its own marks say so.
        """
        ...
