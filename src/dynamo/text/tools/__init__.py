"""Tool-call parsers: one file per output format, and the names under which a model card asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dynamo.text.tools import hermes
from dynamo.text.tools.base import ToolParser
from dynamo.text.tools.forced import NamedCallParser, RequiredCallsParser
from dynamo.text.tools.hermes import HermesParser

__all__ = ["TOOL_FORMATS", "HermesParser", "NamedCallParser", "RequiredCallsParser", "ToolFormat", "ToolParser"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    parser: Callable[[], ToolParser]  # a parser for one choice
    marks: tuple[str, ...]  # must stand in the text, also where they are special tokens
    end_tokens: tuple[str, ...]  # tokens that end a call: where a model also ends its answer with one, it must be seen


_HERMES: Final = ToolFormat(HermesParser, (hermes.OPENING, hermes.CLOSING), (hermes.CLOSING,))

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType({"hermes": _HERMES, "qwen25": _HERMES})
"""Every tool-call parser by the names it goes by."""
