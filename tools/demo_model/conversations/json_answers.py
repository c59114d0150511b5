"""Answers as JSON: in words, by a schema, or forced by guided decoding."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo_model.conversations.draw import LESSONS, Answer, Conversation, Draw, assistant, opening, user, weighted
from demo_model.lessons.question import is_held_out
from demo_model.lessons.reading import described

__all__ = ["json_answer"]


def json_answer(draw: Draw) -> Conversation:
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
        question = draw.any(weighted(rng, tasks))
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
    messages = [*opening(rng), user(text), assistant(answer)]
    return Conversation("JSON", (key,), messages, [Answer(len(messages) - 1, answer, "json", given)], variables)


def _object(draw: Draw) -> tuple[str, dict[str, Any], str]:
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
