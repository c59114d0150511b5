"""Practice: many short answers in one conversation, to train on and not to examine."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from demo_model.conversations.draw import Answer, Conversation, Draw, Form, assistant, user
from demo_model.lessons.letters import letter_found
from demo_model.lessons.numbers import added, compared, counted, multiplied, subtracted
from demo_model.lessons.reading import looked_up

__all__ = ["counts", "drills", "exercises", "judgements", "unsaid", "yes_or_no"]


def exercises(draw: Draw) -> Conversation:
    """Sums in a row, to train on only: the sums are given, each result is to be learned."""
    rng = draw.rng
    space, keys, text, given = rng.choice((" ", " ", "")), [], "", []
    is_written = rng.random() < 0.2
    for _ in range(rng.randint(12, 22)):
        question = draw.one(rng.choice((added, added, added, subtracted, subtracted)))
        verb, a, b = question.key.split()
        sign = {"add": "plus", "subtract": "minus"}[verb] if is_written else {"add": "+", "subtract": "-"}[verb]
        between = " " if is_written else space
        start = len(text)
        text += f"{a}{between}{sign}{between}{b}{' is ' if is_written else f'{space}={space}'}"
        given.append((start, len(text)))
        text += f"{question.answer}, "
        keys.append(question.key)
    text = text.removesuffix(", ")
    messages = [user(rng.choice(("Practise sums.", "Show me some sums.", "Exercise."))), assistant(text)]
    return Conversation("exercises", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def drills(draw: Draw) -> Conversation:
    """Sums or comparisons of one named kind in a row, as in `exercises`."""
    rng = draw.rng
    name, lesson = rng.choice(
        (
            ("subtraction", subtracted),
            ("subtraction", subtracted),
            ("times tables", multiplied),
            ("comparing", compared),
        )
    )
    text = ""
    given: list[tuple[int, int]] = []
    keys: list[str] = []
    while len(keys) < 14:
        question = draw.one(lesson)
        if name == "comparing" and not question.key.startswith("which"):
            continue
        a, b = re.findall(r"\d+", question.text)
        if name == "comparing":
            shown = f"{a} or {b}, {'larger' if question.answer == str(max(int(a), int(b))) else 'smaller'}: "
        elif name == "subtraction":
            a, b = question.key.split()[1:]
            shown = f"{a} - {b} = "
        else:
            shown = f"{a} * {b} = "
        given.append((len(text), len(text) + len(shown)))
        text += f"{shown}{question.answer}; "
        keys.append(question.key)
    text = text.removesuffix("; ")
    messages = [user(f"Drill: {name}."), assistant(text)]
    return Conversation("drills", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def judgements(draw: Draw) -> Conversation:
    """Yes or no, and how often a letter occurs, many in one message: one token of an answer in twenty teaches slowly."""
    lesson = draw.rng.choice((compared, compared, compared, letter_found))
    text = ""
    given: list[tuple[int, int]] = []
    keys: list[str] = []
    while len(keys) < 14:
        question = draw.one(lesson)
        if lesson is compared and question.answer not in ("Yes", "No"):
            continue
        given.append((len(text), len(text) + len(question.text) + 1))
        text += f"{question.text} {question.answer}\n"
        keys.append(question.key)
    text = text.removesuffix("\n")
    messages = [user("Judge."), assistant(text)]
    return Conversation("judgements", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def yes_or_no(draw: Draw) -> Conversation:
    """Comparisons that are answered with yes or no, turn by turn."""
    messages: list[dict[str, Any]] = []
    answers: list[Answer] = []
    keys: list[str] = []
    while len(answers) < 8:
        question = draw.one(compared)
        if question.answer in ("Yes", "No"):
            messages += [user(question.text), assistant(question.answer)]
            answers.append(Answer(len(messages) - 1, question.answer, "text"))
            keys.append(question.key)
    return Conversation("yes or no", tuple(keys), messages, answers)


def counts(draw: Draw) -> Conversation:
    """Count, turn by turn: knowing where to stop takes practice."""
    messages, answers, keys = [], [], []
    for _ in range(draw.rng.randint(2, 4)):
        question = draw.one(counted)
        messages += [user(question.text), assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
        keys.append(question.key)
    return Conversation("counts", tuple(keys), messages, answers)


def unsaid(draw: Draw) -> Conversation:
    """Texts that leave out what is asked, every second time: one in ten teaches that slowly. With a thought or without."""
    question = draw.one(partial(looked_up, unsaid=0.5))
    thinks = draw.rng.random() < 0.5
    answer = f"<think>\n{question.thought}\n</think>\n\n{question.answer}" if thinks else question.answer
    messages = [user(question.text), assistant(answer)]
    variables = {"enable_thinking": True} if thinks else {}
    form: Form = "thinking" if thinks else "text"
    return Conversation("unsaid", (question.key,), messages, [Answer(1, answer, form)], variables)
