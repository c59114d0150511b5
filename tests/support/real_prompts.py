"""Requests for a real model, varied and always the same: questions, turns, code, other scripts, token ids, a word and a page."""

from __future__ import annotations

import random
from typing import Any, Final

from support.http_client import CHAT, COMPLETIONS

__all__ = ["SCHEMAS", "THINGS", "greedy_requests"]

THINGS: Final = (
    "the moon", "a bicycle", "bread", "the French Revolution", "photosynthesis", "a prime number", "an old library",
    "the stock market", "volcanoes", "a cat that speaks", "gravity", "jazz", "the number zero", "vaccines", "the sea",
    "a train to the north", "honey bees", "the alphabet", "rust on iron", "a broken clock", "democracy", "chess", "rain",
)  # fmt: skip
QUESTIONS: Final = (
    "What is {}?", "Explain {} to a child in one sentence.", "Write a short poem about {}.", "List three facts about {}.",
    "Why do people care about {}?", "Give me a title for a book about {}.", "Is {} older than {}? Answer yes or no.",
    "Translate to Spanish: I like {} and {}.", "Compare {} with {}.", "Tell me a joke about {}!", "hi, {}?", "{}",
)  # fmt: skip
BEGINNINGS: Final = (
    "Once upon a time there was {}, and", "The history of {} begins", "Dear Sir or Madam,\n\nI write to you about {}.",
    "1. {}\n2. {}\n3.", "Q: What is {}?\nA:", "In 1969, {}", "| name | value |\n|---|---|\n| {} | 12 |\n|", "\"{}\", she said,",
    "  {}  ", "{} {} {} {} {}", "According to a new study about {},", "# {}\n\n## ",
)  # fmt: skip
CODE: Final = (
    "def fibonacci(n):\n    ", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "SELECT name, COUNT(*) FROM users WHERE", "#include <stdio.h>\n\nint main(void) {\n\tprintf(", "<html>\n  <body>\n    <h1>",
    "for (let i = 0; i < 10; i++) {\n  console.log(", '{"name": "Ada", "age": 36, "langs": ["', "fn main() {\n    let v: Vec<",
    "git commit -m '", "x = [i ** 2 for i in range(10)]\nprint(x)  # ", "while True:\n\ttry:\n\t\t", "a,b,c\n1,2,3\n4,5,",
)  # fmt: skip
SCRIPTS: Final = (
    "Où est la bibliothèque ?", "Straße, Größe, Übermut: was bedeutet das?", "日本の首都はどこですか？", "Привет! Как дела?",
    "ما هي عاصمة مصر؟", "¿Cuánto es 2 + 2?", "🎉🎂 What do these emojis mean? 👩‍👩‍👧", "किताब का मतलब क्या है?", "E\u0301cole, e\u0301te\u0301, nai\u0308ve",
    "Ω ≈ 3.14 × 10⁻⁵ ∑ ∫ √2", "안녕하세요, 반갑습니다", "a\u200bb\u00a0c\u2028d", "\U0001d49c\U0001d4b7\U0001d4b8 \ufb01 ½ ①", "שלום עולם",
)  # fmt: skip
SYSTEMS: Final = (
    "Answer briefly.",
    "You are a pirate.",
    "You are a careful teacher.\nUse simple words.",
    "Réponds en français.",
)
WORD_TOKENS: Final = (50, 49_000)  # ids of whole words and pieces, none of them special


def greedy_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """`count` requests without a model's name, each the route and the body. Greedy, for few tokens each, no two alike."""
    generator = random.Random(20_261)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    while len(found) < count:
        path, body = _request(len(found), generator)
        found.setdefault(repr(body.get("messages") or body["prompt"]), (path, body))
    return list(found.values())


def _request(number: int, generator: random.Random) -> tuple[str, dict[str, Any]]:
    options = {"temperature": 0.0, "max_tokens": 1 + generator.randrange(10)}

    def filled(forms: tuple[str, ...]) -> str:
        form = generator.choice(forms)
        return form.format(*(generator.choice(THINGS) for _ in range(form.count("{}")))) if "{}" in form else form

    def said(*texts: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]

    match number % 10:
        case 0 | 1:
            messages = said(filled(QUESTIONS))
        case 2:
            turns = [filled(QUESTIONS) for _ in range(generator.choice((3, 5)))]
            messages = [{"role": "system", "content": generator.choice(SYSTEMS)}, *said(*turns)]
        case 3:
            messages = said(f"{filled(QUESTIONS)} Go on with this code:\n```\n{generator.choice(CODE)}\n```")
        case 4:
            messages = said(f"{generator.choice(SCRIPTS)} {generator.choice(SCRIPTS)}")
        case 5:
            sentences = " ".join(f"{filled(QUESTIONS)} {filled(BEGINNINGS)}" for _ in range(generator.randrange(4, 20)))
            messages = said(f"Summarize this text.\n\n{sentences}")
        case 6:
            return COMPLETIONS, {"prompt": filled(BEGINNINGS), **options}
        case 7:
            return COMPLETIONS, {"prompt": f"# {generator.choice(THINGS)}\n{generator.choice(CODE)}", **options}
        case 8:
            return COMPLETIONS, {"prompt": f"{generator.choice(SCRIPTS)}\n{generator.choice(SCRIPTS)}", **options}
        case _:
            ids = [generator.randrange(*WORD_TOKENS) for _ in range(generator.choice((1, 2, 7, 40, 150)))]
            return COMPLETIONS, {"prompt": ids, **options}
    return CHAT, {"messages": messages, **options}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD: Final = {"type": "string", "maxLength": 12}
SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    _object(name=WORD, size={"enum": ["small", "large"]}),
    _object(count={"type": "integer", "minimum": 0, "maximum": 99}, is_old={"type": "boolean"}),
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    _object(
        inner=_object(code={"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"}),
        note={"anyOf": [WORD, {"type": "null"}]},
    ),
)
"""Schemas whose answers are short, each with other kinds of values."""
