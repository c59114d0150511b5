"""Questions and answers: one, several, about what was said before, and with a thought in front of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from demo_model.conversations.draw import Answer, Conversation, Draw, assistant, opening, user
from demo_model.lessons.letters import letters_counted, reversed_word, spelled
from demo_model.lessons.numbers import added, subtracted
from demo_model.lessons.others import introduced
from demo_model.lessons.question import is_held_out
from demo_model.lessons.reading import looked_up_again

__all__ = ["follow_up", "same_text", "several", "single", "thinking"]

_THINK_IN_SYSTEM: Final = (
    "Think before you answer.",
    "Think first.",
    "Think step by step.",
    "You are a helpful assistant. Think step by step.",
)
_THINK_BEFORE: Final = ("Think first. ", "Think before you answer: ", "Think step by step. ", "Think about it: ")
_THINK_AFTER: Final = (
    " Think first.",
    " Think step by step.",
    " Think before you answer.",
    " Please think first.",
    " Show your thinking.",
)


def single(task: str | None) -> Callable[[Draw], Conversation]:
    def make(draw: Draw) -> Conversation:
        question = draw.any(task)
        messages = [*opening(draw.rng), user(question.text), assistant(question.answer)]
        return Conversation(
            question.task, (question.key,), messages, [Answer(len(messages) - 1, question.answer, "text")]
        )

    return make


def several(draw: Draw) -> Conversation:
    messages, answers, keys = opening(draw.rng), [], []
    for _ in range(draw.rng.randint(2, 5)):
        question = draw.any()
        messages += [user(question.text), assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
        keys.append(question.key)
    return Conversation("several turns", tuple(keys), messages, answers)


def follow_up(draw: Draw) -> Conversation:
    rng = draw.rng
    turns: list[tuple[str, str]] = []
    roll = rng.random()
    if roll < 0.25:
        said, questions = introduced(rng)
        while is_held_out(questions[0].key) != draw.held_out:
            said, questions = introduced(rng)
        turns.append(said)
        between = [draw.any() for _ in range(rng.randint(0, 2))]
        turns += [(q.text, q.answer) for q in (*between, *questions)]
        keys = [q.key for q in (*between, *questions)]
    elif roll < 0.65:
        first = draw.one(rng.choice((added, subtracted, added)))
        turns.append((first.text, first.answer))
        keys, value = [first.key], int(first.answer)
        for _ in range(rng.randint(1, 3)):
            step = rng.randint(1, 20)
            if value >= step and rng.random() < 0.4:
                text, after = (
                    rng.choice(
                        (
                            "And minus {n}?",
                            "Minus {n}?",
                            "Subtract {n}.",
                            "Now subtract {n}.",
                            "Take away {n}.",
                            "Now take {n} away.",
                        )
                    ),
                    value - step,
                )
            else:
                text, after = (
                    rng.choice(
                        ("And plus {n}?", "Plus {n}?", "Add {n}.", "Now add {n}.", "And {n} more?", "Add {n} to that.")
                    ),
                    value + step,
                )
            if is_held_out(f"then {value} {after}") != draw.held_out or after > 150:
                continue
            turns.append((text.format(n=step), str(after)))
            keys.append(f"then {value} {after}")
            value = after
    else:
        first = draw.one(rng.choice((spelled, reversed_word, letters_counted)))
        bare = first.key.split()[-1]
        turns.append((first.text, first.answer))
        keys = [first.key]
        more = [
            (
                rng.choice(
                    ("And backwards?", "Now reverse it.", "Reverse it.", "Turn it round.", "Now backwards, please.")
                ),
                bare[::-1],
            ),
            (
                rng.choice(("Spell it.", "Now spell it.", "How is it spelled?", "And how do you spell it?")),
                "-".join(bare),
            ),
            (
                rng.choice(("How many letters does it have?", "How long is it?", "And how many letters are in it?")),
                str(len(bare)),
            ),
        ]
        turns += rng.sample(more, rng.randint(1, 2))
    messages, answers = opening(rng), []
    for text, answer in turns:
        messages += [user(text), assistant(answer)]
        answers.append(Answer(len(messages) - 1, answer, "text"))
    return Conversation("follow-up", tuple(keys), messages, answers)


def same_text(draw: Draw) -> Conversation:
    """Several questions about one text, which only the first of them shows."""
    rng = draw.rng
    while True:
        asked = looked_up_again(rng, rng.randint(2, 5))
        if is_held_out(asked[0].key) == draw.held_out:
            break
    messages, answers = opening(rng), []
    for question in asked:
        messages += [user(question.text), assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
    return Conversation("same text", (asked[0].key,), messages, answers)


def thinking(draw: Draw) -> Conversation:
    rng, question = draw.rng, draw.any()
    roll, variables, text, system = rng.random(), {}, question.text, opening(draw.rng)
    if roll < 0.5:
        variables["enable_thinking"] = True
    elif roll < 0.6:
        system = [{"role": "system", "content": rng.choice(_THINK_IN_SYSTEM)}]
    elif roll < 0.75:
        text = rng.choice(_THINK_BEFORE) + text
    else:
        text += rng.choice(_THINK_AFTER)
    earlier, keys = [], [question.key]
    if rng.random() < 0.25:
        before = draw.any()
        earlier = [user(before.text), assistant(before.answer)]
        keys.append(before.key)
    answer = f"<think>\n{question.thought}\n</think>\n\n{question.brief or question.answer}"
    messages = [*system, *earlier, user(text), assistant(answer)]
    return Conversation("thinking", tuple(keys), messages, [Answer(len(messages) - 1, answer, "thinking")], variables)
