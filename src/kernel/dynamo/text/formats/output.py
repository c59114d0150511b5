"""What a grammar finds, as events: without the line breaks that only separate calls; a call that turns out to be none is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo.text.markers import LINE_BREAKS, MAX_SEPARATOR
from dynamo.text.output import (
    CallArguments,
    CallBegan,
    CallDropped,
    CallEnded,
    Content,
    OutputEvent,
    Reasoning,
)


class Output:
    """The events of one choice as a grammar finds them.

    Line breaks that stand alone between the beginning and the first call, between two calls or behind the last one are
    separators (at most `MAX_SEPARATOR`) and left out.
    """

    __slots__ = (
        "_before_waiting", "_events", "_gap", "_has_called", "_is_flowing", "_waiting", "has_all_arguments",
        "is_open", "is_reasoning", "keeps_cut_call", "name", "was_limited",
    )  # fmt: skip

    def __init__(self) -> None:
        self._events: list[OutputEvent] = []
        self._waiting: list[OutputEvent] | None = None  # of calls that are emitted only when they are whole
        self._before_waiting = ("", False, False)  # what `drop` goes back to
        self._gap = ""  # what may be a separator
        self._is_flowing = False  # content since the last call (or the beginning) was more than line breaks
        self._has_called = False
        self.is_open = False  # a call has begun
        self.has_all_arguments = False  # and only closing marks of it are due
        self.is_reasoning = False
        self.name: str | None = None  # of the call that is being read, where it is known before the call is emitted
        self.keeps_cut_call = False  # a call had to come: what there is of one that was cut off is that call
        self.was_limited = False  # the text ended because a limit was reached

    def emitted(self) -> list[OutputEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def is_cut(self) -> bool:
        """Whether a call that ends here counts only with its closing marks."""
        return self.was_limited

    def flowing(self, emit: Callable[[str], None]) -> type[Content] | type[Reasoning] | None:
        """Return the event that any text becomes through `emit` now; None where that depends on the text."""
        if emit == self.reasoning:
            return Reasoning
        return Content if emit == self.content and self._is_flowing else None

    def content(self, text: str) -> None:
        """Emit text for the reader."""
        if not self._is_flowing:
            rest = text.lstrip(LINE_BREAKS)
            self._gap += text[: len(text) - len(rest)]
            if not rest and len(self._gap) <= MAX_SEPARATOR:
                return
            text, self._gap = self._gap + rest, ""
            self._is_flowing = True
        if text:
            self._add(Content(text))

    def reasoning(self, text: str) -> None:
        """Emit text that the model wrote to itself."""
        if text:
            self._add(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call."""
        self.is_open = True
        self._add(CallBegan(name, call_id))

    def arguments(self, text: str) -> None:
        """Emit the next piece of its arguments."""
        self._add(CallArguments(text))

    def end(self) -> None:
        """Complete the call."""
        self._add(CallEnded())
        self.is_open, self.has_all_arguments, self.name = False, False, None
        self._gap, self._is_flowing = "", False
        self._has_called = True

    def leave_open(self) -> None:
        """End a call that breaks in its arguments, which are not taken back; what follows is content."""
        self.is_open, self.has_all_arguments, self.name = False, False, None
        self._gap, self._is_flowing, self._has_called = "", True, True

    def drop(self, raw: str, *, is_cut: bool) -> None:
        """Take the call that is being read back, as far as that is possible: `raw` is its text."""
        if is_cut and self.has_emitted and self.has_all_arguments:
            self.end()
            return
        name, self.name = self.name, None
        self.has_all_arguments = False
        if self._waiting is not None:
            if is_cut and self.keeps_cut_call:
                ends = [place for place, event in enumerate(self._waiting, 1) if isinstance(event, CallEnded)]
                self._events += self._waiting[: ends[-1] if ends else 0]
            self._take_back()
        if is_cut and self.keeps_cut_call:
            if not self.is_open and name:
                self.begin(name)
            self.is_open = False
            self._gap, self._has_called = "", True
        elif self.is_open:
            self.is_open = False
            gap, self._gap = self._gap, ""
            self._is_flowing = True
            if raw:
                self._add(CallDropped(gap + raw))
        else:
            self.content(raw)

    def _take_back(self) -> None:
        """Drop what was held; it was never passed on."""
        self._waiting, self.is_open = None, False
        self._gap, self._is_flowing, self._has_called = self._before_waiting

    @property
    def is_flowing(self) -> bool:
        """Whether any text that comes is content at once, line breaks too."""
        return self._is_flowing

    @property
    def is_behind_call(self) -> bool:
        """Whether nothing but line breaks was emitted since a call ended."""
        return self._has_called and not self._is_flowing

    @property
    def has_emitted(self) -> bool:
        """Whether the client has seen of the call at hand."""
        return self.is_open and self._waiting is None

    @property
    def is_holding(self) -> bool:
        """Whether calls are kept until `release`."""
        return self._waiting is not None

    def skip_separators(self) -> None:
        """Leave out line breaks that were held back."""
        self._gap = ""

    def hold(self) -> None:
        """Keep the events of calls from here on, until `release` or `drop`."""
        self._waiting, self._before_waiting = [], (self._gap, self._is_flowing, self._has_called)

    def release(self) -> None:
        """Emit what was kept."""
        waiting, self._waiting = self._waiting or [], None
        self._events += waiting

    def finish(self) -> None:
        """End the text."""
        gap, self._gap = self._gap, ""
        if gap and not self._has_called:
            self._add(Content(gap))

    def _add(self, event: OutputEvent) -> None:
        events: Any = self._events if self._waiting is None else self._waiting
        events.append(event)
