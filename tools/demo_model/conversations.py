"""Whole conversations made of the lessons: what is trained on, and what is examined."""

from __future__ import annotations

import json
import re
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
from demo_model.lessons.others import SELF_DESCRIPTION, anything_else, introduced
from demo_model.lessons.question import Question, is_held_out
from demo_model.lessons.reading import described, looked_up, looked_up_again
from demo_model.lessons.tools import Call, offered, report

__all__ = ["KINDS", "Answer", "Conversation", "conversation", "example"]

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
# How often each kind comes: first what teaches to copy and to look around, then more of what takes longest to learn.
_EARLY: Final = {
    "arithmetic": 40,
    "counting": 22,
    "one letter": 4,
    "spelling": 12,
    "reversing": 24,
    "comparing": 16,
    "ordering": 10,
    "lookup": 20,
    "anything else": 16,
    "several turns": 60,
    "follow-up": 24,
    "thinking": 36,
    "JSON": 40,
    "tool call": 28,
    "tool result": 7,
    "tool not needed": 10,
    "exercises": 0,
    "same text": 0,
    "drills": 0,
    "counts": 0,
    "judgements": 0,
    "yes or no": 0,
}
_MIDDLE: Final = {
    "arithmetic": 60,
    "counting": 26,
    "one letter": 6,
    "spelling": 8,
    "reversing": 16,
    "comparing": 22,
    "ordering": 14,
    "lookup": 24,
    "anything else": 16,
    "several turns": 45,
    "follow-up": 24,
    "thinking": 36,
    "JSON": 40,
    "tool call": 28,
    "tool result": 7,
    "tool not needed": 16,
    "exercises": 45,
    "same text": 35,
    "drills": 0,
    "counts": 0,
    "judgements": 0,
    "yes or no": 0,
}
_LATE: Final = {
    "arithmetic": 60,
    "counting": 36,
    "one letter": 10,
    "spelling": 5,
    "reversing": 10,
    "comparing": 30,
    "ordering": 20,
    "lookup": 40,
    "anything else": 14,
    "several turns": 34,
    "follow-up": 24,
    "thinking": 36,
    "JSON": 44,
    "tool call": 34,
    "tool result": 7,
    "tool not needed": 28,
    "exercises": 45,
    "same text": 60,
    "drills": 20,
    "counts": 15,
    "judgements": 0,
    "yes or no": 0,
}
_LAST: Final = _LATE | {
    "arithmetic": 50,
    "counting": 50,
    "thinking": 46,
    "JSON": 54,
    "tool call": 40,
    "tool not needed": 32,
    "exercises": 20,
    "same text": 50,
    "drills": 35,
    "counts": 25,
}
# When the rate rises a second time: what takes a sudden turn late, yes or no above all.
_AGAIN: Final = _LAST | {
    "arithmetic": 40,
    "comparing": 40,
    "several turns": 30,
    "thinking": 60,
    "JSON": 60,
    "tool call": 60,
    "tool not needed": 50,
    "exercises": 10,
    "same text": 30,
    "drills": 20,
    "counts": 12,
    "judgements": 60,
}
_LAST_AGAIN: Final = _AGAIN | {
    "arithmetic": 30,
    "comparing": 60,
    "reversing": 14,
    "several turns": 20,
    "thinking": 50,
    "JSON": 40,
    "tool call": 50,
    "tool not needed": 45,
    "same text": 15,
    "drills": 10,
    "judgements": 60,
    "yes or no": 150,
}
STAGES: Final = (  # by the number of the example
    (0, _EARLY),
    (85_000, _MIDDLE),
    (129_000, _LATE),
    (150_000, _LAST),
    (219_000, _AGAIN),
    (261_000, _LAST_AGAIN),
)

# No tool that is offered does these.
_WITHOUT_TOOLS: Final = ("counting", "spelling", "reversing", "comparing", "ordering", "lookup")

_SYSTEMS: Final = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are helpful.", "Answer briefly.", "You are a friendly assistant.", "Be concise.", "You are a teacher.",
    "You are an AI assistant.", "Answer the question.", "You are a calculator.", "Help the user.", "Be polite and short.", "Follow the instructions.",
)  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class _Draw:
    """Takes questions of one side of the split."""

    rng: Random
    held_out: bool
    weights: Mapping[str, int]

    def one(self, lesson: Lesson) -> Question:
        while True:
            question = lesson(self.rng)
            if is_held_out(question.key) == self.held_out:
                return question

    def any(self, task: str | None = None) -> Question:
        task = task or _weighted(self.rng, [(self.weights[name], name) for name in LESSONS])
        return self.one(_weighted(self.rng, LESSONS[task]))

    def call(self, *, wanted: bool = True) -> tuple[list[dict[str, Any]], Call]:
        while True:
            tools, call = offered(self.rng, wanted=wanted)
            if is_held_out(call.key) == self.held_out:
                return tools, call


def conversation(
    rng: Random, *, held_out: bool = False, kind: str | None = None, weights: Mapping[str, int] = _LAST
) -> Conversation:
    """Return one conversation, of a kind by its weight, with questions of one side of the split only."""
    kind = kind or _weighted(rng, [(weights[name], name) for name in KINDS])
    return KINDS[kind](_Draw(rng, held_out, weights))


def example(seed: int, number: int) -> Conversation:
    """Return the training conversation of this number; the same for the same seed, in any order."""
    weights = next(weights for first, weights in reversed(STAGES) if number >= first or first == 0)
    return conversation(Random(f"{seed}:{number}"), weights=weights)


def _single(task: str | None) -> Callable[[_Draw], Conversation]:
    def make(draw: _Draw) -> Conversation:
        question = draw.any(task)
        messages = [*_system(draw.rng), _user(question.text), _assistant(question.answer)]
        return Conversation(
            question.task, (question.key,), messages, [Answer(len(messages) - 1, question.answer, "text")]
        )

    return make


def _several(draw: _Draw) -> Conversation:
    messages, answers, keys = _system(draw.rng), [], []
    for _ in range(draw.rng.randint(2, 5)):
        question = draw.any()
        messages += [_user(question.text), _assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
        keys.append(question.key)
    return Conversation("several turns", tuple(keys), messages, answers)


def _thinking(draw: _Draw) -> Conversation:
    rng, question = draw.rng, draw.any()
    roll, variables, text, system = rng.random(), {}, question.text, _system(draw.rng)
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
        earlier = [_user(before.text), _assistant(before.answer)]
        keys.append(before.key)
    answer = f"<think>\n{question.thought}\n</think>\n\n{question.answer}"
    messages = [*system, *earlier, _user(text), _assistant(answer)]
    return Conversation("thinking", tuple(keys), messages, [Answer(len(messages) - 1, answer, "thinking")], variables)


def _json(draw: _Draw) -> Conversation:
    rng = draw.rng
    if rng.random() < 0.35:
        text, values, key = _object(draw)
        ask = rng.choice(
            (
                "{t} Give me the {k} as JSON.",
                "{t} Answer as JSON with the keys {q}.",
                "{t}\nWrite this as JSON with {k}.",
                "Write as JSON with the keys {q}: {t}",
                "{t} Reply in JSON with the keys {q}.",
                "Extract {k} as JSON: {t}",
            )
        )
        plain = rng.choice(("{t}", "Extract the data: {t}", "{t} What do you know?", "Read this: {t}"))
    else:
        tasks = [(draw.weights[name], name) for name in LESSONS if name != "anything else"]
        question = draw.any(_weighted(rng, tasks))
        values = {"answer" if rng.random() < 0.3 else rng.choice(question.names): question.value}
        text, key = question.text, question.key
        ask = rng.choice(
            (
                "{t} Answer as JSON with the key {q}.",
                "{t} Answer in JSON with the key {q}.",
                "{t} Reply as JSON: {{{q}: ...}}",
                "Answer as JSON with the key {q}: {t}",
                "{t} Give me JSON with the key {q}.",
            )
        )
        if list(values) == ["answer"] and rng.random() < 0.5:
            ask = rng.choice(
                (
                    "{t} Answer as JSON.",
                    "{t} Answer in JSON.",
                    "{t} Reply in JSON.",
                    "Answer as JSON: {t}",
                    "{t} Use JSON.",
                    "{t} Give me JSON.",
                )
            )
        plain = "{t}"
    keys = list(values)
    listed = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    quoted = ", ".join(f'"{k}"' for k in keys)
    answer = json.dumps(values)
    variables: dict[str, Any] = {}
    given: tuple[tuple[int, int], ...] = ()
    roll = rng.random()
    if roll < 0.4:
        text = ask.format(t=text, k=listed, q=quoted)
    elif roll < 0.6:
        text = plain.format(t=text)
        variables["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": rng.choice(("answer", "result", "data")), "schema": _schema(rng, values)},
        }
    elif roll < 0.7:
        text = (
            plain.format(t=text)
            + rng.choice((" Answer as JSON with this schema: ", "\nJSON schema: ", " Schema: "))
            + json.dumps(_schema(rng, values))
        )
    elif roll < 0.75 and keys == ["answer"]:
        variables["response_format"] = {"type": "json_object"}
    else:  # nobody says so in the prompt: guided decoding forces the keys, the values are the model's
        text = plain.format(t=text)
        answer = json.dumps(values, separators=(",", ":") if rng.random() < 0.25 else None)
        given = tuple(
            (answer.index(f'"{k}"') if n else 0, answer.index(f'"{k}"') + len(k) + 3) for n, k in enumerate(keys)
        )
    messages = [*_system(rng), _user(text), _assistant(answer)]
    return Conversation("JSON", (key,), messages, [Answer(len(messages) - 1, answer, "json", given)], variables)


def _object(draw: _Draw) -> tuple[str, dict[str, Any], str]:
    """Return (a text, some of its facts, the key)."""
    while True:
        text, values = described(draw.rng)
        if is_held_out(text) == draw.held_out:
            keys = list(values)
            if draw.rng.random() < 0.3:
                draw.rng.shuffle(keys)
                keys = keys[: draw.rng.randint(1, len(keys))]
            return text, {k: values[k] for k in keys}, text


def _schema(rng: Random, values: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {key: _type_of(value) for key, value in values.items()}}
    if rng.random() < 0.8:
        schema["required"] = list(values)
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _type_of(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case list():
            return {"type": "array", "items": {"type": "integer"}}
    return {"type": "string"}


def _tools(draw: _Draw) -> Conversation:
    """Return a request that wants a tool: the call, in the form that the client's `tool_choice` leads to."""
    rng = draw.rng
    tools, call = draw.call()
    messages, answers = _system(rng), []
    keys = [call.key]
    variables: dict[str, Any] = {"tools": tools}
    if rng.random() < 0.12:
        before = draw.any(rng.choice(_WITHOUT_TOOLS))
        messages += [_user(before.text), _assistant(before.answer)]
        keys.append(before.key)
    messages.append(_user(call.text))
    arguments, roll = json.dumps(call.arguments), rng.random()
    if roll < 0.12:  # "required"
        text = json.dumps(
            [{"name": call.name, "parameters": call.arguments}], separators=(",", ":") if rng.random() < 0.25 else None
        )
        messages.append(_assistant(text))
        answers.append(Answer(len(messages) - 1, text, "json", ((0, text.index("name") + 6),)))
    elif roll < 0.2:  # one tool by name
        text = json.dumps(call.arguments, separators=(",", ":") if rng.random() < 0.25 else None)
        messages.append(_assistant(text))
        answers.append(Answer(len(messages) - 1, text, "json", ((0, 2),)))
    else:
        text = f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
        if roll < 0.35:
            variables["enable_thinking"] = True
            text = f"<think>\nthe tool {call.name} does this\n</think>\n\n{text}"
        messages.append(_assistant(text))
        answers.append(Answer(len(messages) - 1, text, "call"))
    return Conversation("tool call", tuple(keys), messages, answers, variables)


def _tool_result(draw: _Draw) -> Conversation:
    rng = draw.rng
    tools, call = draw.call()
    told = json.dumps(call.result, separators=(",", ":") if rng.random() < 0.3 else None)
    answer = report(call.result)
    if rng.random() < 0.2:
        told = answer = str(next(iter(call.result.values())))
    messages = [*_system(rng), _user(call.text), _called(call), {"role": "tool", "content": told}, _assistant(answer)]
    return Conversation(
        "tool result", (call.key,), messages, [Answer(len(messages) - 1, answer, "text")], {"tools": tools}
    )


def _tool_unused(draw: _Draw) -> Conversation:
    """Return tools that do not fit: the answer is what it would be without them."""
    rng = draw.rng
    tools, call = draw.call(wanted=False)
    if rng.random() < 0.35:
        text, answer, key = call.text, SELF_DESCRIPTION, call.key
    else:
        question = draw.any(rng.choice(_WITHOUT_TOOLS))
        text, answer, key = question.text, question.answer, question.key
    messages = [*_system(rng), _user(text), _assistant(answer)]
    return Conversation(
        "tool not needed", (key,), messages, [Answer(len(messages) - 1, answer, "text")], {"tools": tools}
    )


def _follow_up(draw: _Draw) -> Conversation:
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
    messages, answers = _system(rng), []
    for text, answer in turns:
        messages += [_user(text), _assistant(answer)]
        answers.append(Answer(len(messages) - 1, answer, "text"))
    return Conversation("follow-up", tuple(keys), messages, answers)


def _exercises(draw: _Draw) -> Conversation:
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
    messages = [_user(rng.choice(("Practise sums.", "Show me some sums.", "Exercise."))), _assistant(text)]
    return Conversation("exercises", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def _drills(draw: _Draw) -> Conversation:
    """Write a conversation as `_exercises` does, of the one named kind of sum or comparison."""
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
    messages = [_user(f"Drill: {name}."), _assistant(text)]
    return Conversation("drills", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def _judgements(draw: _Draw) -> Conversation:
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
    messages = [_user("Judge."), _assistant(text)]
    return Conversation("judgements", tuple(keys), messages, [Answer(1, text, "text", tuple(given))])


def _yes_or_no(draw: _Draw) -> Conversation:
    """Turn by turn."""
    messages: list[dict[str, Any]] = []
    answers: list[Answer] = []
    keys: list[str] = []
    while len(answers) < 8:
        question = draw.one(compared)
        if question.answer in ("Yes", "No"):
            messages += [_user(question.text), _assistant(question.answer)]
            answers.append(Answer(len(messages) - 1, question.answer, "text"))
            keys.append(question.key)
    return Conversation("yes or no", tuple(keys), messages, answers)


def _counts(draw: _Draw) -> Conversation:
    """Count, turn by turn: knowing where to stop takes practice."""
    messages, answers, keys = [], [], []
    for _ in range(draw.rng.randint(2, 4)):
        question = draw.one(counted)
        messages += [_user(question.text), _assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
        keys.append(question.key)
    return Conversation("counts", tuple(keys), messages, answers)


def _same_text(draw: _Draw) -> Conversation:
    """Several questions about one text, which only the first of them shows."""
    rng = draw.rng
    while True:
        asked = looked_up_again(rng, rng.randint(2, 5))
        if is_held_out(asked[0].key) == draw.held_out:
            break
    messages, answers = _system(rng), []
    for question in asked:
        messages += [_user(question.text), _assistant(question.answer)]
        answers.append(Answer(len(messages) - 1, question.answer, "text"))
    return Conversation("same text", (asked[0].key,), messages, answers)


KINDS: Final[dict[str, Callable[[_Draw], Conversation]]] = {
    **{task: _single(task) for task in LESSONS},
    "several turns": _several,
    "follow-up": _follow_up,
    "thinking": _thinking,
    "JSON": _json,
    "tool call": _tools,
    "tool result": _tool_result,
    "tool not needed": _tool_unused,
    "exercises": _exercises,
    "same text": _same_text,
    "drills": _drills,
    "counts": _counts,
    "judgements": _judgements,
    "yes or no": _yes_or_no,
}
"""Every kind of conversation."""


def _weighted(rng: Random, choices: tuple[tuple[int, T], ...] | list[tuple[int, T]]) -> T:
    return rng.choices([choice for _, choice in choices], [weight for weight, _ in choices])[0]


def _system(rng: Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < 0.15 else []


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _called(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
