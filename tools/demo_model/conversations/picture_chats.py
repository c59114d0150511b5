"""Chats about a picture: one question or several, with a thought in front, or about something else beside it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from demo_model.conversations.draw import Answer, Conversation, Draw, assistant, opening, user
from demo_model.conversations.stages import LAST
from demo_model.lessons.pictures import MANY, Picture, asked_about, picture
from demo_model.lessons.question import Question, is_held_out

__all__ = ["PICTURE_KINDS", "picture_chat", "picture_key", "practised"]

Suits = Callable[[Picture, Question], bool]


def picture_key(shown: Picture) -> str:
    """Return what the split is made by."""
    return f"picture {shown.key}"


def picture_chat(rng: Random, shown: Picture, questions: list[Question], *, thinks: bool = False) -> Conversation:
    """Return a chat whose first message has the picture."""
    messages, answers = opening(rng), []
    for number, question in enumerate(questions):
        messages.append(_with_picture(rng, question.text) if number == 0 else user(question.text))
        text = f"<think>\n{question.thought}\n</think>\n\n{question.answer}" if thinks else question.answer
        messages.append(assistant(text))
        answers.append(Answer(len(messages) - 1, text, "thinking" if thinks else "text"))
    keys = (picture_key(shown), *(question.key for question in questions))
    variables = {"enable_thinking": True} if thinks else {}
    return Conversation("pictures", keys, messages, answers, variables, (shown,))


def _with_picture(rng: Random, text: str) -> dict[str, Any]:
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts if rng.random() < 0.55 else parts[::-1]}


def practised(rng: Random, shown: Picture) -> Conversation:
    """Return a chat to learn from, of any kind."""
    roll = rng.random()
    if roll < 0.12:
        return _beside(rng, shown, held_out=False)
    count = rng.randint(2, 4) if roll < 0.24 else 1
    return picture_chat(rng, shown, [asked_about(rng, shown) for _ in range(count)], thinks=0.24 < roll < 0.3)


def _beside(rng: Random, shown: Picture, *, held_out: bool) -> Conversation:
    """Return a question that has nothing to do with the picture."""
    return picture_chat(rng, shown, [Draw(rng, held_out, LAST).any()])


def _examined(
    kind: str, about: str | None, suits: Suits = lambda shown, question: True
) -> Callable[[Random, bool], Conversation]:
    def make(rng: Random, held_out: bool) -> Conversation:
        while True:
            shown = picture(rng, kind)
            if is_held_out(picture_key(shown)) != held_out:
                continue
            question = asked_about(rng, shown, about)
            if suits(shown, question):
                return picture_chat(rng, shown, [question])

    return make


def _text(rng: Random, held_out: bool) -> Conversation:
    while True:
        shown = picture(rng)
        if is_held_out(picture_key(shown)) == held_out:
            return _beside(rng, shown, held_out=held_out)


def _is_of_one(shown: Picture, question: Question) -> bool:
    return len(shown.shapes) == 1 and question.answer == shown.shapes[0][0]


PICTURE_KINDS: Final[dict[str, Callable[[Random, bool], Conversation]]] = {
    "picture: how many dots": _examined("dots", "count", lambda shown, _: shown.dots < MANY),
    "picture: colour of dots": _examined("dots", "colour", lambda shown, _: shown.colour is not None),
    "picture: colour of a shape": _examined("shapes", "colour", lambda shown, _: len(shown.shapes) == 1),
    "picture: which digit": _examined("digit", "digit"),
    "picture: which of two shapes": _examined("shapes", "either", _is_of_one),
    "picture: colour of one of two": _examined("shapes", "colour", lambda shown, _: len(shown.shapes) == 2),
    "picture: description": _examined("dots", "describe"),
    "picture: nothing known": _examined("other", None),
    "text beside a picture": _text,
}
"""What is examined: (random numbers, whether the picture was held back) to a chat with one question."""
