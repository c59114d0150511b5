"""What a guided request may make a grammar compiler do: bounds on size, rules, references and depth.

Compilers of grammars recurse: one rule that names the next, three thousand times, ends the process that compiles it. The
frontend checks these bounds before a worker sees the request; an engine that compiles checks them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from dynamo.settings.readers import integer
from dynamo.settings.table import setting

_BRACKET: Final = re.compile(r"[(\[{)\]}]")
_SCHEMA: Final = re.compile(r"%json\s*")
_TEXT_MEMBERS: Final = frozenset({"grammar", "pattern", "regex"})  # of structural tags and schemas
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class GuidedLimits:
    """Bounds of one `guided_decoding`. A schema's characters are those of its names and strings."""

    # fmt: off
    # llguidance 1.9 overflows its stack at 3,000 rules that name each other in turn.
    rules: int = setting(1000, "DYN_GUIDED_MAX_RULES", integer(1), "Rules of a grammar")
    # Objects that refer to each other overflow the same stack at 1,000.
    references: int = setting(500, "DYN_GUIDED_MAX_REFERENCES", integer(1), "`$ref`s of a schema")
    depth: int = setting(128, "DYN_GUIDED_MAX_DEPTH", integer(1), "Objects and arrays of a schema inside each other")
    brackets: int = setting(500, "DYN_GUIDED_MAX_BRACKETS", integer(1),
        "Brackets of a grammar or regular expression inside each other")
    # Counting so many takes 12 ms.
    nodes: int = setting(20_000, "DYN_GUIDED_MAX_NODES", integer(1), "Members and items of a schema, or choices")
    characters: int = setting(1_000_000, "DYN_GUIDED_MAX_CHARACTERS", integer(1),
        "Characters in the names and strings of a schema, or in all choices")
    grammar_characters: int = setting(131_072, "DYN_GUIDED_MAX_GRAMMAR_CHARACTERS", integer(1),
        "Characters of a grammar or regular expression")
    # fmt: on


DEFAULT_GUIDED_LIMITS: Final = GuidedLimits()


class GuidedExcess(Struct, frozen=True):
    """One bound that a request exceeds."""

    member: str  # of `guided_decoding`
    limit: str  # the name in the refusal counters
    detail: str  # continues a sentence that begins with the member


def find_excess(guided: Mapping[str, Any] | None, limits: GuidedLimits = DEFAULT_GUIDED_LIMITS) -> GuidedExcess | None:
    """Return the first bound that `guided_decoding` exceeds, or None. Takes time in proportion to the bounds at most."""
    if not guided:
        return None
    for member in ("regex", "grammar"):
        text = guided.get(member)
        if isinstance(text, str) and (found := _text_excess(member, member, text, limits)) is not None:
            return found
    for member in ("json", "structural_tag", "choice"):
        value = guided.get(member)
        if value is not None and (found := _tree_excess(member, value, limits)) is not None:
            return found
    return None


def _text_excess(member: str, kind: str, text: str, limits: GuidedLimits) -> GuidedExcess | None:
    if len(text) > limits.grammar_characters:
        return _too_long(member, len(text), limits.grammar_characters, "DYN_GUIDED_MAX_GRAMMAR_CHARACTERS")
    if bracket_depth(text) > limits.brackets:
        return GuidedExcess(
            member, "guided_brackets", f"nests more than {limits.brackets} brackets (DYN_GUIDED_MAX_BRACKETS)"
        )
    if kind != "grammar":
        return None
    if (rules := _count_rules(text)) > limits.rules:
        return GuidedExcess(
            member, "guided_rules", f"has {rules} rules, at most {limits.rules} are allowed (DYN_GUIDED_MAX_RULES)"
        )
    # All together: each one alone may be within bounds.
    return _tree_excess(member, _schemas_within(text), limits) if _SCHEMA.search(text) else None


def _schemas_within(grammar: str) -> list[Any]:
    """Return the schemas that stand in a Lark grammar as `%json {...}`; one that cannot be read is left to the compiler."""
    found: list[Any] = []
    at = 0
    while (mark := _SCHEMA.search(grammar, at)) is not None:
        at = mark.end()
        try:
            value, at = _DECODER.raw_decode(grammar, at)
        except (ValueError, RecursionError):
            continue
        found.append(value)
    return found


def _count_rules(grammar: str) -> int:
    """Count the rules of a Lark or GBNF grammar, or a few too many: every line with a colon counts as a Lark rule."""
    marks = grammar.count("::=")  # GBNF allows several in one line
    return marks or sum(":" in line for line in grammar.splitlines())


def bracket_depth(text: str) -> int:
    """Count how many brackets stand inside each other at the deepest place of `text`."""
    deepest = depth = 0
    for mark in _BRACKET.findall(text):
        if mark in "([{":
            depth += 1
            if depth > deepest:
                deepest = depth
        elif depth:
            depth -= 1
    return deepest


def _tree_excess(member: str, value: Any, limits: GuidedLimits) -> GuidedExcess | None:
    if isinstance(value, str):  # the schema as a text
        if len(value) > limits.characters:
            return _too_long(member, len(value), limits.characters, "DYN_GUIDED_MAX_CHARACTERS")
        if bracket_depth(value) > limits.depth and bracket_depth(_without_strings(value)) > limits.depth:
            return _too_deep(member, limits)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None  # is not a schema: the reader of the request refuses it in its own words
    nodes = characters = references = depth = 0
    level = [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                nodes += len(item)
                characters += sum(map(len, item))
                references += "$ref" in item
                for key in _TEXT_MEMBERS & item.keys():
                    text = item[key]
                    if isinstance(text, str) and (found := _text_excess(member, key, text, limits)) is not None:
                        return found
                children: Any = item.values()
            elif isinstance(item, list | tuple):
                nodes += len(item)
                children = item
            else:
                if isinstance(item, str):
                    characters += len(item)
                continue
            if depth > limits.depth:
                return _too_deep(member, limits)
            if nodes > limits.nodes:
                return GuidedExcess(
                    member,
                    "guided_nodes",
                    f"has more than {limits.nodes} members and items in it (DYN_GUIDED_MAX_NODES)",
                )
            inner.extend(children)
        if characters > limits.characters:
            return _too_long(member, characters, limits.characters, "DYN_GUIDED_MAX_CHARACTERS")
        if references > limits.references:
            return GuidedExcess(
                member,
                "guided_references",
                f"has more than {limits.references} references (DYN_GUIDED_MAX_REFERENCES)",
            )
        level = inner
    return None


def _without_strings(text: str) -> str:
    return "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])


def _too_deep(member: str, limits: GuidedLimits) -> GuidedExcess:
    return GuidedExcess(
        member, "guided_depth", f"nests more than {limits.depth} objects and arrays (DYN_GUIDED_MAX_DEPTH)"
    )


def _too_long(member: str, characters: int, limit: int, variable: str) -> GuidedExcess:
    return GuidedExcess(
        member, "guided_characters", f"has {characters} characters, at most {limit} are allowed ({variable})"
    )
