"""Whole conversations made of the lessons: what is trained on, and what is examined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from demo_model.conversations.chats import follow_up, same_text, several, single, thinking
from demo_model.conversations.draw import LESSONS, Answer, Conversation, Draw, weighted
from demo_model.conversations.json_answers import json_answer
from demo_model.conversations.practice import counts, drills, exercises, judgements, unsaid, yes_or_no
from demo_model.conversations.stages import LAST, STAGES
from demo_model.conversations.tool_use import tool_call, tool_result, tool_unused

__all__ = ["KINDS", "Answer", "Conversation", "conversation", "example"]


def conversation(
    rng: Random, *, held_out: bool = False, kind: str | None = None, weights: Mapping[str, int] = LAST
) -> Conversation:
    """Return one conversation, of a kind by its weight, with questions of one side of the split only."""
    kind = kind or weighted(rng, [(weights[name], name) for name in KINDS])
    return KINDS[kind](Draw(rng, held_out, weights))


def example(seed: int, number: int) -> Conversation:
    """Return the training conversation of this number; the same for the same seed, in any order."""
    weights = next(weights for first, weights in reversed(STAGES) if number >= first or first == 0)
    return conversation(Random(f"{seed}:{number}"), weights=weights)


KINDS: Final[dict[str, Callable[[Draw], Conversation]]] = {
    **{task: single(task) for task in LESSONS},
    "several turns": several,
    "follow-up": follow_up,
    "thinking": thinking,
    "JSON": json_answer,
    "tool call": tool_call,
    "tool result": tool_result,
    "tool not needed": tool_unused,
    "exercises": exercises,
    "same text": same_text,
    "drills": drills,
    "counts": counts,
    "judgements": judgements,
    "yes or no": yes_or_no,
    "unsaid": unsaid,
}
"""Every kind of conversation."""
