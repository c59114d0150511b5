"""Tool-call parsers: one file per output format, and the names under which a model card requests them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from dynamo.text.tools import hermes
from dynamo.text.tools.base import ToolParser
from dynamo.text.tools.forced import NamedCallParser, RequiredCallsParser
from dynamo.text.tools.hermes import HermesParser

__all__ = ["TOOL_FORMATS", "HermesParser", "NamedCallParser", "RequiredCallsParser", "ToolFormat", "ToolParser"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    parser: Callable[[], ToolParser]  # a parser for one choice
    marks: tuple[str, ...]  # the first begins a call; must stand in the text, also where they are special tokens
    end_tokens: tuple[str, ...]  # tokens that end a call: where a model also ends its answer with one, it must be seen
    # (name, schema of the arguments) -> the call as a tag for guided decoding; None: the format has no such tag.
    call_tag: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None


_HERMES: Final = ToolFormat(
    HermesParser, (hermes.OPENING, hermes.CLOSING), end_tokens=(hermes.CLOSING,), call_tag=hermes.call_tag
)

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType({"hermes": _HERMES, "qwen25": _HERMES})
"""Every tool-call parser by the names it goes by."""
