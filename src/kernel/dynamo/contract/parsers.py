"""The output parser that a worker names. A worker only advertises a name; the frontend applies the parser."""

from __future__ import annotations

import difflib

from dynamo.errors import InvalidArgument
from dynamo.protocol.parsers import REASONING_PARSERS, TOOL_PARSERS


def get_tool_parser_names() -> list[str]:
    """Return the names that `--dyn-tool-call-parser` can choose."""
    return sorted(TOOL_PARSERS)


def get_reasoning_parser_names() -> list[str]:
    """Return the names that `--dyn-reasoning-parser` can choose."""
    return sorted(REASONING_PARSERS)


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises InvalidArgument for a name that no parser has, listing the names there are, near ones once more."""
    for what, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidArgument(f"{what} must be one of {', '.join(sorted(known))}, got {name!r}{hint}")
