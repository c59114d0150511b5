"""Reasoning parsers: one file per output format, and the names under which a model card requests them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dynamo.text.markers import WHITE_SPACE
from dynamo.text.reasoning.base import ReasoningParser
from dynamo.text.reasoning.think import CLOSING, OPENING, ThinkParser

__all__ = ["DEFAULT_MARKS", "REASONING_FORMATS", "ReasoningFormat", "ReasoningParser", "ThinkParser"]


DEFAULT_MARKS: Final = (OPENING, CLOSING)
"""The tags of a model whose card names no reasoning parser, if its vocabulary has them."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models that reasons between `<think>` and `</think>` begins, and when it does not reason at all."""

    starts_inside: bool = False  # the first token is reasoning, with or without an opening tag
    needs_thinking: bool = False  # nothing is parsed unless the request switches thinking on
    heeds_off: bool = False  # nothing is parsed when the request switches thinking off
    marks: tuple[str, str] = (OPENING, CLOSING)  # must stand in the text, also where they are special tokens

    def applies(self, thinking: bool | None) -> bool:
        """Return whether to parse. `thinking` is the mode of the request or the model's default; None: unset."""
        if self.needs_thinking:
            return thinking is True
        return not (self.heeds_off and thinking is False)

    def begins_inside(self, prompt: str) -> bool:
        """Return whether the answer begins as reasoning behind this prompt (its last characters are enough)."""
        return self.starts_inside or prompt.rstrip(WHITE_SPACE).endswith(OPENING)

    def parser(self, *, begins_inside: bool, json_is_content: bool = False) -> ReasoningParser:
        """Make a parser for one choice."""
        return ThinkParser(starts_inside=begins_inside, json_is_content=json_is_content)


_BASIC: Final = ReasoningFormat()
_INSIDE: Final = ReasoningFormat(starts_inside=True)
_INSIDE_UNLESS_OFF: Final = ReasoningFormat(starts_inside=True, heeds_off=True)
_WHEN_THINKING: Final = ReasoningFormat(starts_inside=True, needs_thinking=True)
_BASIC_UNLESS_OFF: Final = ReasoningFormat(heeds_off=True)

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {
        "basic": _BASIC,
        "qwen3": _BASIC,
        "qwen3_coder": _BASIC,
        "glm45": _BASIC,
        "glm47": _BASIC,
        "nemotron_deci": _BASIC,
        "kimi_k2": _BASIC,
        "deepseek_v4": _BASIC_UNLESS_OFF,
        "deepseek-v4": _BASIC_UNLESS_OFF,
        "deepseekv4": _BASIC_UNLESS_OFF,
        "deepseek_v41": _BASIC_UNLESS_OFF,
        "deepseek_r1": _INSIDE,
        "step3": _INSIDE,
        "minimax_m2": _INSIDE,
        "deepseek_v3_2": _INSIDE_UNLESS_OFF,
        "nemotron_nano": _INSIDE_UNLESS_OFF,
        "nemotron3": _INSIDE_UNLESS_OFF,
        "nemotron_v3": _INSIDE_UNLESS_OFF,
        "kimi_k25": _INSIDE_UNLESS_OFF,
        "deepseek_v3": _WHEN_THINKING,
        "deepseek_v3_1": _WHEN_THINKING,
    }
)
"""Every reasoning parser by the names it goes by."""
