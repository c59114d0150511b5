"""What every output format is read with: the text that has not been read yet, and the steps a grammar is made of.

A grammar is a generator. It reads what comes next from its `Scanner` and yields where that depends on text that has not
arrived; `TextMachine` runs it as pieces come in. Every step decides on the text alone and never on where a piece ended, so
what a machine finds does not depend on the cuts, and an answer that is read at once is read by the same steps as a stream.

A call is read inside `Scanner.attempt`. Where the text turns out to be no call a step raises `NotACall`, and all that was
read since the attempt (or the last whole call in it) began is content, to the letter. Reading goes on behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

from dynamo.text.formats.json_reader import JsonReader
from dynamo.text.formats.output import Output
from dynamo.text.markers import MAX_SEPARATOR, WHITE_SPACE, MarkerSearch
from dynamo.text.output import Idle, OutputEvent

MAX_CALL_CHARACTERS: Final = 1_048_576
"""How much of a call may be held back, and how much of it is kept to become content if it is none, in characters."""

MAX_NAME: Final = 256
"""Characters of a tool's or parameter's name between two tags; a longer one is none."""

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_SEPARATORS: Final = ",;]" + WHITE_SPACE

T = TypeVar("T")
Step: TypeAlias = Generator[None, None, T]


class NotACall(Exception):
    """What is being read is not a call."""


class Scanner:
    """The unread text of one choice, and the steps that read it. A step that is a generator is run with `yield from`."""

    __slots__ = ("at", "idle", "is_ended", "out", "raw", "room", "text")

    def __init__(self, out: Output) -> None:
        self.out = out
        self.text, self.at = "", 0  # what is behind `at` has not been read
        self.is_ended = False
        self.raw: list[str] | None = None  # what the attempt at hand has read
        self.room = 0  # characters that may still be added to `raw`
        # Text without any of these characters is an event of its own as it comes; None while a grammar has to see it.
        self.idle: Idle | None = None

    def take(self, end: int) -> str:
        """Read up to `end`."""
        if self.raw is not None and end - self.at > self.room:
            if not self.out.has_emitted:
                self.raw.append(self.text[self.at : self.at + self.room])
                self.at += self.room
                raise NotACall
            self.raw = None
        piece = self.text[self.at : end]
        self.at = end
        if self.raw is not None:
            self.room -= len(piece)
            self.raw.append(piece)
        return piece

    # -- attempts --------------------------------------------------------------------------------------------------------

    def attempt(self, calls: Step[None], *, goes_on: Callable[[str], int] = len) -> Step[None]:
        """Run the grammar of one or more calls; what is no call becomes content.

        `goes_on` returns where in that text reading goes on: behind all of it, if it is left out.
        """
        self.commit()
        try:
            yield from calls
        except NotACall:
            self._fail(goes_on)
        self.raw = None

    def commit(self) -> None:
        """Read what follows apart: a whole call ends here. Calls that are emitted together only end together."""
        if not self.out.is_holding:
            self.raw, self.room = [], MAX_CALL_CHARACTERS

    def _fail(self, goes_on: Callable[[str], int]) -> None:
        # Beyond the limit nothing is kept: what was emitted of the call stays, and is never complete.
        raw, self.raw = "".join(self.raw or ()), None
        if (end := goes_on(raw)) < len(raw):
            if (back := len(raw) - end) > self.at:  # a piece that came before began it
                self.text, self.at = raw[end:] + self.text[self.at :], back
            self.at -= back
            raw = raw[:end]
            self.out.drop(raw, is_cut=False)
            return
        is_separator = self.is_ended and self.out.is_behind_call and not raw.strip(_SEPARATORS)
        self.out.drop("" if is_separator else raw, is_cut=self.is_ended)

    # -- text ------------------------------------------------------------------------------------------------------------

    def prose(self, marks: MarkerSearch, emit: Callable[[str], None]) -> Step[str | None]:
        """Emit text up to the next mark, which is returned and not read; None at the end of the text."""
        while True:
            start, end, mark = marks.search(self.text, self.at)
            if mark is None and self.is_ended:
                start = self.before_cut_mark(start, end)
            if start > self.at:
                emit(self.take(start))
            if mark is not None:
                return mark
            if self.is_ended:
                return None
            if start == end and (kind := self.out.flowing(emit)) is not None:
                self.idle = Idle(marks.first_chars, kind)
            yield
            self.idle = None

    def before_cut_mark(self, start: int, end: int) -> int:
        """Return where text ends that was cut off; the beginning of a mark is no text where a call had to come."""
        if start == end or not self.out.keeps_cut_call:
            return end
        self.out.skip_separators()
        return start

    def until(self, marks: MarkerSearch, *, limit: int = MAX_CALL_CHARACTERS) -> Step[str]:
        """Read the text in front of the next mark, which is not read; NotACall when none comes."""
        pieces: list[str] = []
        while True:
            start, _, mark = marks.search(self.text, self.at)
            size = start - self.at
            pieces.append(self.take(self.at + min(size, limit)))
            if size > limit or (mark is None and self.is_ended):
                self.take_cut_mark()
                raise NotACall
            limit -= size
            if mark is not None:
                return "".join(pieces)
            yield

    # -- what must come --------------------------------------------------------------------------------------------------

    def space(self) -> Step[None]:
        """Read white space, if there is any."""
        while True:
            match = _SPACE.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                self.take(match.end())
            if self.at < len(self.text) or self.is_ended:
                return
            yield

    def peek(self) -> Step[str]:
        """Return the next character without reading it; "" at the end of the text."""
        while self.at == len(self.text) and not self.is_ended:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, *literals: str) -> Step[str | None]:
        """Read the literal that comes next, if one does. None may begin with another one."""
        while True:
            literal, is_certain = self._literal_at(self.at, literals)
            if literal is not None:
                self.take(self.at + len(literal))
            if is_certain:
                if literal is None and self.at < len(self.text) and self._is_begun(self.at, literals):
                    self.take_cut_mark()
                return literal
            yield

    def take_cut_mark(self) -> None:
        """Read the mark that the end of the text cut off, where a call had to come: it is no text."""
        if self.is_ended and self.out.keeps_cut_call:
            self.take(len(self.text))

    def expect(self, *literals: str) -> Step[str]:
        """Read the literal that has to come next."""
        literal = yield from self.accept(*literals)
        if literal is None:
            raise NotACall
        return literal

    def accept_behind_space(self, *literals: str, others: str = "") -> Step[str | None]:
        """Read white space (and any of `others`) and a literal behind it; nothing, unless a literal comes."""
        while True:
            end = self.at
            while end < len(self.text) and (self.text[end] in WHITE_SPACE or self.text[end] in others):
                end += 1
                if end - self.at > MAX_SEPARATOR:
                    return None
            literal, is_certain = self._literal_at(end, literals)
            if literal is not None:
                self.take(end + len(literal))
            if is_certain:
                if literal is None and self._is_begun(end, literals):
                    self.take_cut_mark()
                return literal
            yield

    def comes(self, offset: int, *literals: str) -> Step[bool]:
        """Return whether white space and then a literal (or "", the end of the text) is `offset` ahead; reads nothing."""
        while True:
            end = self.at + offset
            while end < len(self.text) and self.text[end] in WHITE_SPACE:
                end += 1
                if end - self.at - offset > MAX_SEPARATOR:
                    return False
            if end >= len(self.text) and self.is_ended:
                return "" in literals
            literal, is_certain = self._literal_at(end, [literal for literal in literals if literal])
            if is_certain:
                return literal is not None
            yield

    def _literal_at(self, at: int, literals: tuple[str, ...] | list[str]) -> tuple[str | None, bool]:
        """Return the literal at `at`, and whether that (or that there is none) is certain."""
        for literal in literals:
            if self.text.startswith(literal, at):
                return literal, True
        rest = self.text[at : at + max(map(len, literals), default=0)]
        return None, self.is_ended or not any(literal.startswith(rest) for literal in literals)

    def _is_begun(self, at: int, literals: tuple[str, ...]) -> bool:
        return any(len(self.text) - at <= len(literal) and literal.startswith(self.text[at:]) for literal in literals)

    # -- JSON ------------------------------------------------------------------------------------------------------------

    def json(self, emit: Callable[[str], None], reader: JsonReader | None = None) -> Step[None]:
        """Read one JSON value (with `reader`) and emit it as it comes; NotACall where it is none or is cut off."""
        reader = JsonReader() if reader is None else reader
        while True:
            end, read = reader.read(self.text, self.at)
            self.take(end)
            if self.is_ended:
                read += reader.finish()
            if read:
                emit(read)
            if reader.is_complete:
                return
            if reader.is_broken or self.is_ended:
                raise NotACall
            yield

    def json_text(self) -> Step[str]:
        """Return one JSON value as text."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return "".join(pieces)


Grammar: TypeAlias = Callable[[Scanner], Step[None]]


class TextMachine:
    """Runs a grammar over the text of one choice.

    - What the events of all pushes and of `finish` mean together depends on the whole text only, never on its cuts.
    - No input raises. What turns out to be no call is content, character for character; of reasoning and of calls only
      the marks and the white space that touches them are left out.
    - Plain text is emitted at once, a call as it comes. A call that breaks or is cut off when it has been emitted in part
      is taken back with `CallDropped`, which has its text.
    - Held back are the beginning of a mark, white space (`markers.MAX_SEPARATOR`), and what cannot be emitted yet of a
      call, up to `MAX_CALL_CHARACTERS`.
    """

    __slots__ = ("_out", "_scanner", "_steps")

    def __init__(self, grammar: Grammar, out: Output | None = None) -> None:
        self._out = Output() if out is None else out
        self._scanner = Scanner(self._out)
        self._steps: Generator[None, None, None] | None = grammar(self._scanner)
        self._run()  # up to where it needs text

    @property
    def is_inside(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known now."""
        return self._out.is_reasoning

    @property
    def idle(self) -> Idle | None:
        """How plain text passes, as it does without changing anything here; None while all text has to be read."""
        return self._scanner.idle

    def push(self, text: str) -> list[OutputEvent]:
        """Read the next piece of text, which may be empty."""
        scanner = self._scanner
        if (idle := scanner.idle) is not None and idle.characters.isdisjoint(text):
            return [idle.kind(text)] if text else []
        scanner.text = scanner.text[scanner.at :] + text if scanner.at < len(scanner.text) else text
        scanner.at = 0
        self._run()
        return self._out.emitted()

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """End the text and return what was held back. Call it once; push nothing after it.

        `is_cut`: a limit ended the text, so a call is complete only with its own closing marks.
        """
        self._out.was_limited = is_cut
        self._scanner.is_ended = True
        self._run()
        self._out.finish()
        return self._out.emitted()

    def _run(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
