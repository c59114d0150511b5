"""Seeded JSON schemas, regexes and grammars whose answers are short: every string, list and number is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

WORDS = ("red", "green", "blue", "größe", "a b", "x_1", 'né"e', "0", "true", "日本")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema that some document satisfies; one in four refers to a definition, twice."""
    if rng.random() < 0.75:
        return _schema(rng, 2)
    part = {"$ref": "#/$defs/part"}
    return {
        "$defs": {"part": _schema(rng, 1)},
        "type": "object",
        "properties": {"one": part, "many": {"type": "array", "items": part, "maxItems": 2}},
        "required": ["one", "many"],
        "additionalProperties": False,
    }


_Maker = Callable[[random.Random, int], dict[str, Any]]


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    simple: list[_Maker] = [_integer, _string, _enum, _const, _boolean, _pattern]
    nested: list[_Maker] = [_object, _object, _array, _tuple, _any_of]
    make = rng.choice(simple + nested if depth > 0 else simple)
    return make(rng, depth - 1)


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    shortest = rng.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 9)}


def _pattern(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{random_regex(rng)}$"}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, None, True], rng.randint(1, 5))}


def _const(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 7, None, [1, "a"], {"k": "v"}])}


def _boolean(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "tags", "ü", "a b", "nested"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    items = _schema(rng, depth)
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def random_regex(rng: random.Random) -> str:
    """Within what both Python's `re` and llguidance read alike."""
    atoms = ["[a-c]", "[0-9]", "x", "yz", "(ab|cd|e)", "[^a-z]", "ü", r"\.", "(?:k|)"]
    tails = ["", "", "?", "{2}", "{1,3}"]
    return "".join(rng.choice(atoms) + rng.choice(tails) for _ in range(rng.randint(1, 5)))


def random_choices(rng: random.Random) -> list[str]:
    return rng.sample([*WORDS, "yes", "yes, please", "no", "(a|b)", "multi\nline"], rng.randint(1, 6))


def random_grammar(rng: random.Random) -> tuple[str, str]:
    """(a grammar in one of the two notations, a regex for the same language)."""
    left, middle, right = (rng.choice(["ab", "c", "12", "éa"]) for _ in range(3))
    if rng.random() < 0.5:
        return f'root ::= "{left}" part "{right}"\npart ::= "{middle}" | "x" "{middle}"', f"{left}x?{middle}{right}"
    few = rng.randint(1, 4)
    return f'start: "{left}" item{{1,{few}}}\nitem: "{middle}" | /[0-4]/', f"{left}({middle}|[0-4]){{1,{few}}}"
