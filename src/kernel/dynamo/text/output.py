"""What an answer is made of once its markup has been read: plain text, reasoning, tool calls.

Parsers turn text into these events. Two runs of events mean the same when joining the texts of each kind, and the
calls in their order, gives the same: `joined` is that meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never, final

from msgspec import Struct


@final
class Content(Struct, frozen=True, gc=False):
    """Text for the reader."""

    text: str


@final
class Reasoning(Struct, frozen=True, gc=False):
    """Text the model wrote to itself."""

    text: str


@final
class CallBegan(Struct, frozen=True, gc=False):
    """A call of this function; the arguments that follow, up to the next `CallBegan`, are its own."""

    name: str
    id: str | None = None  # None: the text carries none


@final
class CallArguments(Struct, frozen=True, gc=False):
    """The next piece of the arguments: all pieces together are the text of a JSON object, if the call ends."""

    text: str
    call: int | None = None  # of which call, counted from 0; None: of the last one that began


@final
class CallEnded(Struct, frozen=True, gc=False):
    """The call is complete. A call that never ends was cut short, and its arguments are no whole JSON."""


@final
class CallDropped(Struct, frozen=True, gc=False):
    """The last call that began is none after all, or was cut off: its text is content.

    A stream has shown its beginning already and leaves it unfinished; an answer in one piece has the text instead.
    """

    text: str


@final
class Idle(Struct, frozen=True):
    """A parser that holds nothing back: text without any of `characters` becomes one event of this kind."""

    characters: frozenset[str]
    kind: type[Content] | type[Reasoning]


OutputEvent: TypeAlias = Content | Reasoning | CallBegan | CallArguments | CallEnded | CallDropped


@dataclass(slots=True)
class JoinedCall:
    """One call of an answer; incomplete where the text ends in it and a call had to come."""

    name: str
    arguments: str = ""
    is_complete: bool = False
    id: str | None = None


@dataclass(slots=True)
class Joined:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[JoinedCall] = field(default_factory=list)


class Joiner:
    """Puts events together, however they were cut."""

    __slots__ = ("_arguments", "_calls", "_content", "_dropped", "_reasoning")

    def __init__(self) -> None:
        self._dropped: set[int] = set()  # calls that are none
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[JoinedCall] = []
        self._arguments: list[list[str]] = []  # of each call

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Take over the next events."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegan(name, call_id):
                    self._calls.append(JoinedCall(name, id=call_id))
                    self._arguments.append([])
                case CallArguments(text, call):
                    self._arguments[-1 if call is None else call].append(text)
                case CallEnded():
                    self._calls[-1].is_complete = True
                case CallDropped(text):
                    self._content.append(text)
                    self._dropped.add(len(self._calls) - 1)
                case _:
                    assert_never(event)

    def result(self) -> Joined:
        """Return the parts joined so far."""
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        calls = [call for number, call in enumerate(self._calls) if number not in self._dropped]
        return Joined("".join(self._content), "".join(self._reasoning), calls)


def joined(events: Iterable[OutputEvent]) -> Joined:
    """Join the events into one answer."""
    joiner = Joiner()
    joiner.add(events)
    return joiner.result()
