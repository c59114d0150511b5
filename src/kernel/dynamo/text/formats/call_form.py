"""What a format of calls is: the marks that begin a call, and how to read what follows them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from dynamo.text.formats.scanner import Scanner, Step
from dynamo.text.formats.tool_set import ToolSet


class CallForm(ABC):
    """How a family of models writes calls among text. `tagged_answer` finds them, with reasoning around."""

    __slots__ = ()

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """The marks that must reach the parser, also where they are special tokens; the first begins a call."""

    @property
    @abstractmethod
    def starts(self) -> tuple[str, ...]:
        """What begins a call; in front of any of these, `calls` is run."""

    @property
    def stray(self) -> tuple[str, ...]:
        """Marks that are removed where they close nothing."""
        return ()

    @property
    def behind_reasoning(self) -> tuple[str, ...]:
        """What begins a call right behind the reasoning, where models forget the mark."""
        return ()

    @property
    def frame(self) -> tuple[str, ...]:
        """Marks around the text of an answer, which are removed with the line breaks that touch them."""
        return ()

    @property
    def noise(self) -> re.Pattern[str] | None:
        """The form of a run of `starts` that begin no call: they are not tried one by one."""
        return None

    @property
    def is_whole_answer(self) -> bool:
        """Whether calls without a mark may be all of the content: `whole_answer` is run at its beginning."""
        return False

    @property
    def may_stand_in_reasoning(self) -> bool:
        """Whether a call in reasoning can be distinguished from text about one: it has marks, and they are its own."""
        return True

    @abstractmethod
    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        """Read the call, or calls, that `mark` begins (it has not been read); NotACall where there is none."""

    def whole_answer(self, s: Scanner, tools: ToolSet) -> Step[None]:
        """Read the content as calls and nothing else, if it is that."""
        yield from ()
