"""Messages as a template may read them: no null that a template would print, and reasoning where the template looks.

Clients send members that are null ("content": null beside tool calls, "tool_calls": null from a library that dumps every
field). A template prints a null as the text `None`, and loops over it with an error. What a template does look at is
read from its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["TemplateTraits", "ThinkMarks", "readable_messages", "traits_of"]

ThinkMarks = tuple[str, str]
"""The tags a model writes around its reasoning."""

_TESTS_NULL_CONTENT: Final = re.compile(r"content['\"]?\s*\]?\s*(?:is\s+(?:not\s+)?none|[!=]=\s*none)\b", re.IGNORECASE)
_OTHER_MEMBER: Final = re.compile(r"\b(?:m|msg|\w*message)(?:\.|\[['\"])(thinking|reasoning)\b")
_READS_PARTS: Final = re.compile(r"\bfor\s+\w+\s+in\s+[^%}]*\bcontent\b['\"]?\]?\s*(?![\w.])")
_OPTIONAL: Final = ("tool_calls", "reasoning_content", "reasoning", "refusal", "name", "audio", "function_call")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template does with members that not every template knows."""

    tests_null_content: bool = False  # a null content means something to it (some write calls only beside a null)
    reasoning_member: str | None = None  # the member it reads earlier reasoning from; None: it reads none
    reads_parts: bool = False  # it walks through a content that is a list; else media have no place in its prompt


def traits_of(source: str) -> TemplateTraits:
    """Read the traits from a template's source."""
    member = "reasoning_content" if "reasoning_content" in source else None
    if member is None and (other := _OTHER_MEMBER.search(source)) is not None:
        member = other.group(1)
    reads_parts = _READS_PARTS.search(source) is not None
    return TemplateTraits(_TESTS_NULL_CONTENT.search(source) is not None, member, reads_parts)


def readable_messages(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits, think_marks: ThinkMarks | None
) -> list[Mapping[str, Any]]:
    """Return the messages for a template of these traits; a message that needs no change is the same object.

    Reasoning of earlier turns goes into the member the template reads. For a template that reads none the reasoning
    goes in front of the content, between `think_marks`; without marks the model has no form for it, and it is left out.
    """
    return [_readable(message, traits, think_marks) for message in messages]


def _readable(message: Mapping[str, Any], traits: TemplateTraits, think_marks: ThinkMarks | None) -> Mapping[str, Any]:
    dropped = [name for name in _OPTIONAL if name in message and (message[name] is None or message[name] == [])]
    if dropped:
        message = {name: value for name, value in message.items() if name not in dropped}
    if message.get("role") == "assistant":
        message = _with_reasoning(message, traits, think_marks)
    is_null = message.get("content") is None and ("content" in message or message.get("role") == "assistant")
    if is_null and not traits.tests_null_content:
        return {**message, "content": ""}
    if is_null and "content" not in message:
        return {**message, "content": None}  # the same message, whichever way the client spells it
    return message


def _with_reasoning(
    message: Mapping[str, Any], traits: TemplateTraits, think_marks: ThinkMarks | None
) -> Mapping[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str) or not reasoning:
        return message
    if traits.reasoning_member is not None:
        if message.get(traits.reasoning_member):
            return message
        return {**message, traits.reasoning_member: reasoning}
    content = message.get("content")
    # Beside a null content such a template writes the calls; a text there would make it leave them out.
    is_needed_null = content is None and traits.tests_null_content and "tool_calls" in message
    if think_marks is None or is_needed_null or not isinstance(content, str | None):
        return message
    opening, closing = think_marks
    return {**message, "content": f"{opening}\n{reasoning.strip()}\n{closing}\n\n{content or ''}"}
