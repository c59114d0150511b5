"""What every lesson yields: one question whose answer follows from it, and the split that holds some back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Final

__all__ = ["HELD_OUT_SHARE", "Question", "is_held_out", "phrase"]

HELD_OUT_SHARE: Final = 16  # one question of so many is never trained on

Value = int | str | bool | list[int] | list[str]


@dataclass(frozen=True, slots=True)
class Question:
    """One thing asked and its only right answer.

    `key` is the problem without its wording ("add 27 15"): the split is made by it, so that a problem held back is
    held back in every wording, with thinking and as JSON. Where only the wording can be new (times tables, small
    talk) it is the text.
    """

    task: str
    key: str
    text: str
    answer: str
    thought: str  # what is written between the think tags, where thinking is asked for
    value: Value  # the answer as JSON
    names: tuple[str, ...] = ("answer",)  # keys under which a client may want it
    brief: str | None = None  # the answer behind a thought, where the plain answer shows its way itself


def is_held_out(key: str) -> bool:
    """Return whether a problem belongs to the examination, not to training."""
    digest = blake2b(key.lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT_SHARE == 0


def phrase(rng: Random, wordings: Sequence[str], **values: object) -> str:
    """Return one of the wordings, filled in, and sometimes written as carelessly as people write."""
    text = rng.choice(wordings).format(**values)
    roll = rng.random()
    if roll < 0.12:
        text = text[0].lower() + text[1:]
    if 0.08 < roll < 0.2 and text[-1] in ".?":
        text = text[:-1]
    if roll > 0.94:
        text = (
            rng.choice(("Please: ", "Hi! ", "Hello, ", "OK. ", "Can you help me? ", "Quick question: ", "Now: ")) + text
        )
    elif roll > 0.9 and text[-1] in ".?":
        text = text + rng.choice((" Thanks!", " Please.", " Thank you.", " Be brief."))
    return text
