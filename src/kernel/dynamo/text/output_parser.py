"""The events of one choice: what its text means, without the calls that the request does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dynamo.text.formats.scanner import TextMachine
from dynamo.text.output import CallArguments, CallBegan, CallDropped, Content, Idle, OutputEvent, Reasoning

MAX_HELD_REASONING: Final = 1_048_576
"""Characters of reasoning that wait to become content (`fills_content`); longer reasoning is emitted as reasoning."""


class OutputParser:
    """Text in, events out. Keeps the promises of `TextMachine`: the events' meaning does not depend on the cuts, and
    nothing raises.
    """

    __slots__ = (
        "_begun", "_calls", "_fills_content", "_forced", "_held", "_held_characters", "_machine", "_only_first_call",
        "_only_function", "_places", "idle",
    )  # fmt: skip

    def __init__(
        self,
        machine: TextMachine,
        forced: TextMachine | None = None,
        *,
        only_first_call: bool = False,
        only_function: str | None = None,
        fills_content: bool = False,
    ) -> None:
        """`machine` reads the text, and `forced` what is content for it: a forced choice in a unified format.

        `only_first_call` drops every further call, and `only_function` every call of another function.

        `fills_content`: reasoning with no answer behind it is content, so it is held back until there is other output.
        """
        self._machine, self._forced = machine, forced
        self._only_first_call, self._only_function = only_first_call, only_function
        self._begun = 0  # calls that were shown
        self._calls = 0  # of those, the ones that were not dropped
        self._places: list[int | None] = []  # of each call, among those shown; None: it was left out
        self._fills_content = fills_content
        self._held: list[str] = []
        self._held_characters = 0
        self.idle: Idle | None = None  # how text passes that no mark begins in; None while all text has to be read

    @property
    def is_inside(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known now."""
        return self._machine.is_inside

    def push(self, text: str) -> list[OutputEvent]:
        """Parse the next piece of text, which may be empty."""
        idle = self.idle
        if idle is not None and text and idle.characters.isdisjoint(text):
            return [idle.kind(text)]  # nearly every piece: no mark begins in it, and nothing is held back
        events = self._emitted(self._machine.push(text))
        if not self._fills_content and self._forced is None:
            self.idle = self._machine.idle
        return events

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """End the text; return the events held back. `is_cut`: the text ended because a limit was reached."""
        events = self._emitted(self._machine.finish(is_cut=is_cut))
        if self._forced is not None:
            events += self.kept(self._forced.finish(is_cut=is_cut))
        if self._held:
            events.append(Content("".join(self._held)))
            self._held = []
        return events

    def _emitted(self, found: Sequence[OutputEvent]) -> list[OutputEvent]:
        if self._forced is None:
            return self.kept(found)
        events: list[OutputEvent] = []
        for event in found:
            events += self.kept(self._forced.push(event.text) if isinstance(event, Content) else [event])
        return events

    def kept(self, found: Sequence[OutputEvent]) -> list[OutputEvent]:
        """Return the events without the calls that the request does not allow. Reasoning may wait, see `fills_content`."""
        events: list[OutputEvent] = []
        for event in found:
            if isinstance(event, Reasoning):
                events += self._hold(event.text) if self._fills_content else (event,)
                continue
            if isinstance(event, CallBegan):
                is_other = self._only_function not in (None, event.name)
                is_left_out = is_other or (self._only_first_call and self._calls > 0)
                self._places.append(None if is_left_out else self._begun)
                self._begun += not is_left_out
                self._calls += not is_left_out
            place = self._places[-1] if self._places else None
            if isinstance(event, CallDropped):
                if place is None:
                    event = Content(event.text)
                else:
                    self._calls -= 1
            elif isinstance(event, CallArguments) and event.call is not None:  # an engine may write several at a time
                place = self._places[event.call]
                event = CallArguments(event.text, place)
            if isinstance(event, Content) or place is not None:
                if self._fills_content:
                    events += self._release()
                events.append(event)
        return events

    def _hold(self, reasoning: str) -> list[OutputEvent]:
        room = MAX_HELD_REASONING - self._held_characters
        self._held.append(reasoning)
        self._held_characters += len(reasoning)
        return self._release() if len(reasoning) > room else []

    def _release(self) -> list[OutputEvent]:
        """Switch to reasoning because there is an answer: the held text is reasoning, and so is all that follows."""
        self._fills_content = False
        held, self._held = "".join(self._held), []
        return [Reasoning(held)] if held else []
