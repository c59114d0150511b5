"""The output parser that a worker names. A worker only advertises a name; the frontend applies the parser."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo.errors import InvalidArgument
from dynamo.protocol.parsers import BUILT_REASONING_PARSERS, BUILT_TOOL_PARSERS, REASONING_PARSERS, TOOL_PARSERS

__all__ = ["check_parsers", "get_reasoning_parser_names", "get_tool_parser_names", "warn_of_parsers_not_built"]

logger = logging.getLogger(__name__)


def get_tool_parser_names() -> list[str]:
    """Return the names that `--dyn-tool-call-parser` can choose and our own frontend applies."""
    return sorted(BUILT_TOOL_PARSERS)


def get_reasoning_parser_names() -> list[str]:
    """Return the names that `--dyn-reasoning-parser` can choose and our own frontend applies."""
    return sorted(BUILT_REASONING_PARSERS)


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises InvalidArgument for a name that no parser has, listing the names there are."""
    for what, name, known in _chosen(tool_call_parser, reasoning_parser):
        if name not in known:
            raise InvalidArgument(f"{what} must be one of {', '.join(sorted(known))}, got {name!r}")


def warn_of_parsers_not_built(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Warn when only a frontend of the native system could apply a parser."""
    built = {"tool_call_parser": BUILT_TOOL_PARSERS, "reasoning_parser": BUILT_REASONING_PARSERS}
    for what, name, _ in _chosen(tool_call_parser, reasoning_parser):
        if name not in built[what]:
            logger.warning(
                "%s %r is not in this version: it is written on the model card for frontends of the native system, and "
                "ours shows the output as it comes",
                what,
                name,
            )


def _chosen(tool_call_parser: str | None, reasoning_parser: str | None) -> list[tuple[str, str, Sequence[str]]]:
    chosen = (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    )
    return [(what, name, known) for what, name, known in chosen if name is not None]
