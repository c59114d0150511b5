"""The output parsers this version has. A worker only advertises a name; the frontend applies the parser."""

from __future__ import annotations

from typing import Final

__all__ = ["get_reasoning_parser_names", "get_tool_parser_names"]

_TOOL_PARSERS: Final[tuple[str, ...]] = ()  # none is built yet; a frontend of the native system knows its own
_REASONING_PARSERS: Final[tuple[str, ...]] = ()


def get_tool_parser_names() -> list[str]:
    """Names that `--dyn-tool-call-parser` can choose and our own frontend applies."""
    return sorted(_TOOL_PARSERS)


def get_reasoning_parser_names() -> list[str]:
    """Names that `--dyn-reasoning-parser` can choose and our own frontend applies."""
    return sorted(_REASONING_PARSERS)
