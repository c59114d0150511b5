"""MiniMax's way of asking for nothing: `<think>` is put in front of the content, and nothing is divided."""

from __future__ import annotations

from dynamo.text.output import Content, Idle, Reasoning
from dynamo.text.reasoning.think import OPENING

__all__ = ["PrependThink"]


class PrependThink:
    """Keeps the promises of `base.ReasoningParser`; an answer without text gets nothing in front."""

    __slots__ = ("_has_begun",)

    def __init__(self) -> None:
        self._has_begun = False

    @property
    def is_inside(self) -> bool:
        return False

    @property
    def idle(self) -> Idle | None:
        return Idle(frozenset(), Content) if self._has_begun else None

    def push(self, text: str) -> list[Content | Reasoning]:
        if not text:
            return []
        if not self._has_begun:
            self._has_begun = True
            text = OPENING + text
        return [Content(text)]

    def finish(self, *, is_cut: bool = False) -> list[Content | Reasoning]:
        return []
