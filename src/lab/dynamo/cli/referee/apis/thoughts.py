"""What agents need of every API that generates text: reasoning apart, long conversations, members of later releases."""

from __future__ import annotations

from typing import Final

from dynamo.cli.referee.checks import CannotJudge, demand
from dynamo.cli.referee.exchange import Json, ServerAnswer

TURNS: Final = 41  # messages: most models have room for them, and a template that takes few of them fails
MARKS: Final = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>")


def turns() -> list[Json]:
    """Return a long conversation, in the form of chats. It ends with the user."""
    return [
        {"role": "assistant" if n % 2 else "user", "content": f"Yes, {n}." if n % 2 else f"Is it {n}?"}
        for n in range(TURNS)
    ]


def demand_apart(text: str, *, is_apart: bool) -> None:
    """Raise Broken where a text has a mark of reasoning, CannotJudge where the model wrote no reasoning at all."""
    found = next((mark for mark in MARKS if mark in text), None)
    demand(found is None, f"the text has the mark {found!r} of reasoning")
    if not is_apart:
        raise CannotJudge("the model wrote no reasoning")


def demand_unknown_member(answer: ServerAnswer, name: str) -> None:
    """Raise Broken unless a member that no API has is ignored, or refused by its name."""
    if answer.status == 200:
        return
    demand(answer.status == 400, f"expected status 200 or 400, got {answer.message}")
    # Anywhere in the body: that errors have their form is the promise of another check.
    demand(name in answer.body.decode(errors="replace"), f"the refusal does not name the member: {answer.message}")
