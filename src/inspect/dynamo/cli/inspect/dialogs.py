"""Questions of the live screen: confirm an action, type a filter, a prompt or a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from dynamo.cli.inspect.lines import Line, Tone, TonedText
from dynamo.cli.inspect.widgets import LinesView

MAX_REASON: Final = 400
CONFIRM_CHARACTERS: Final = 4


@dataclass(frozen=True, slots=True)
class ActionQuestion:
    """What is about to be done to what."""

    action: str  # abort, drain, quarantine or undrain
    subject: str  # "request" or "worker"
    id: str
    about: str = ""

    @property
    def to_type(self) -> str:
        """What must be typed: the end of the id."""
        return self.id[-CONFIRM_CHARACTERS:]


class ConfirmDialog(ModalScreen[str | None]):
    """Asks for a reason and for the end of the id; gives the reason back, or None."""

    BINDINGS: ClassVar = [("escape", "leave", "leave it")]
    CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog > Vertical { width: 76; max-width: 95%; height: auto; border: round $error; background: $surface; padding: 1 2; }
    ConfirmDialog LinesView { height: auto; }
    ConfirmDialog Input { margin-top: 1; }
    """

    def __init__(self, question: ActionQuestion) -> None:
        super().__init__()
        self._question = question
        self._problem = ""

    def compose(self) -> ComposeResult:
        """Lay the dialog out."""
        with Vertical():
            yield LinesView(self._lines, id="question")
            yield Input(placeholder="reason (goes into the audit log)", max_length=MAX_REASON, id="reason")
            yield Input(placeholder="the last characters of its id", max_length=64, id="confirm")

    def _lines(self, width: int) -> list[Line]:
        asked = self._question
        found: list[Line] = [
            (TonedText.of(f"{asked.action} {asked.subject} {asked.id}", Tone.BAD),),
            *([(TonedText.of(asked.about),)] if asked.about else []),
            (),
            (TonedText.of(f"Write a reason, then type {asked.to_type} to go on."),),
            (TonedText("Esc leaves everything as it is.", Tone.DIM),),
        ]
        return [*found, (TonedText.of(self._problem, Tone.WARN),)] if self._problem else found

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go on to the second field; then judge both."""
        event.stop()
        reason, typed = (self.query_one(name, Input).value.strip() for name in ("#reason", "#confirm"))
        if event.input.id == "reason":
            self.query_one("#confirm", Input).focus()
            return
        if not reason:
            self._complain("a reason is needed", "#reason")
        elif typed != self._question.to_type:
            self._complain(f"that is not {self._question.to_type}", "#confirm")
        else:
            self.dismiss(reason)

    def _complain(self, problem: str, field: str) -> None:
        self._problem = problem
        self.query_one("#question", LinesView).remake()
        self.query_one(field, Input).focus()

    def action_leave(self) -> None:
        """Do nothing."""
        self.dismiss(None)


class TextDialog(ModalScreen[str | None]):
    """Asks for one line of text, and gives it back once `problem_of` has nothing against it."""

    BINDINGS: ClassVar = [("escape", "leave", "leave it")]
    CSS = """
    TextDialog { align: center bottom; }
    TextDialog > Vertical { width: 100%; height: auto; background: $surface; border-top: solid $primary; padding: 0 1; }
    TextDialog LinesView { height: auto; }
    TextDialog Input { border: none; height: 1; padding: 0; background: $surface; }
    """

    def __init__(self, title: str, value: str, problem_of: Callable[[str], str | None]) -> None:
        super().__init__()
        self._title = title
        self._value = value
        self._problem_of = problem_of
        self._problem = ""

    def compose(self) -> ComposeResult:
        """Lay the dialog out."""
        with Vertical():
            yield LinesView(self._lines)
            yield Input(self._value, max_length=1024)

    def _lines(self, width: int) -> list[Line]:
        line: Line = (TonedText.of(f"{self._title}  ", Tone.ACCENT), TonedText("Enter: take it  Esc: leave", Tone.DIM))
        return [line, (TonedText.of(self._problem, Tone.WARN),)] if self._problem else [line]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Judge the text."""
        event.stop()
        problem = self._problem_of(event.value.strip())
        if problem is None:
            self.dismiss(event.value.strip())
            return
        self._problem = problem
        self.query_one(LinesView).remake()

    def action_leave(self) -> None:
        """Leave all as it was."""
        self.dismiss(None)
