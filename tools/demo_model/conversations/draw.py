"""What conversations are made of: questions of one side of the split, messages, and answers to learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal, TypeVar

from demo_model.lessons.letters import letter_found, letters_counted, reversed_word, spelled
from demo_model.lessons.numbers import (
    added,
    compared,
    counted,
    items_counted,
    multiplied,
    ordered,
    story,
    subtracted,
)
from demo_model.lessons.others import anything_else
from demo_model.lessons.pictures import Picture
from demo_model.lessons.question import Question, is_held_out
from demo_model.lessons.reading import looked_up
from demo_model.lessons.tools import Call, offered

__all__ = ["LESSONS", "Answer", "Conversation", "Draw", "Form", "assistant", "called", "opening", "user", "weighted"]

T = TypeVar("T")
Form = Literal["text", "json", "call", "thinking"]
Lesson = Callable[[Random], Question]


LESSONS: Final[dict[str, tuple[tuple[int, Lesson], ...]]] = {
    "arithmetic": ((10, added), (7, subtracted), (3, multiplied), (1, story)),
    "counting": ((4, counted), (2, items_counted), (3, letters_counted)),
    "one letter": ((1, letter_found),),
    "spelling": ((1, spelled),),
    "reversing": ((1, reversed_word),),
    "comparing": ((1, compared),),
    "ordering": ((1, ordered),),
    "lookup": ((1, looked_up),),
    "anything else": ((1, anything_else),),
}

_SYSTEMS: Final = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are helpful.", "Answer briefly.", "You are a friendly assistant.", "Be concise.", "You are a teacher.",
    "You are an AI assistant.", "Answer the question.", "You are a calculator.", "Help the user.", "Be polite and short.", "Follow the instructions.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the assistant that is trained on, or examined.

    `given` are ranges of its characters that guided decoding would force, so that there is nothing to learn in them;
    the first may start the answer, and then an examination starts behind it.
    """

    at: int  # index of its message
    text: str
    form: Form
    given: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a client sends them, the variables of the chat template, and the answers to learn."""

    task: str
    keys: tuple[str, ...]  # of everything asked in it
    messages: list[dict[str, Any]]
    answers: list[Answer]
    variables: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()  # of its parts of the type image, in their order


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws questions of one side of the split."""

    rng: Random
    held_out: bool
    weights: Mapping[str, int]

    def one(self, lesson: Lesson) -> Question:
        while True:
            question = lesson(self.rng)
            if is_held_out(question.key) == self.held_out:
                return question

    def any(self, task: str | None = None) -> Question:
        task = task or weighted(self.rng, [(self.weights[name], name) for name in LESSONS])
        return self.one(weighted(self.rng, LESSONS[task]))

    def call(self, *, wanted: bool = True) -> tuple[list[dict[str, Any]], Call]:
        while True:
            tools, call = offered(self.rng, wanted=wanted)
            if is_held_out(call.key) == self.held_out:
                return tools, call


def weighted(rng: Random, choices: tuple[tuple[int, T], ...] | list[tuple[int, T]]) -> T:
    return rng.choices([choice for _, choice in choices], [weight for weight, _ in choices])[0]


def opening(rng: Random) -> list[dict[str, Any]]:
    """Return how a conversation begins: seldom with a system message, mostly with nothing."""
    return [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.15 else []


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
