"""The ids of Kimi K2, which carry the name: `functions.NAME:INDEX`. The client gets the id as the model wrote it."""

from __future__ import annotations

import re
from typing import Final

from dynamo.text.formats.json_calls import NamedJson
from dynamo.text.formats.scanner import NotACall
from dynamo.text.formats.tool_set import ToolSet

__all__ = ["KIMI_K2", "identify"]

_ID: Final = re.compile(r"(?:functions\.)?([\w.\-]+):([0-9]+)")


def identify(text: str, tools: ToolSet) -> tuple[str, str | None]:
    """Return the name and the id of a call. An odd id is a call of the tool whose name stands in it."""
    if (found := _ID.fullmatch(text)) is not None:
        name = found[1]
        return (f"functions.{name}" if f"functions.{name}" in tools.names else name), text
    known = [name for name in tools.names if name in text]
    if not known or len(text.split()) > 1:
        raise NotACall
    return max(known, key=len), None


KIMI_K2: Final = NamedJson(
    opening="<|tool_call_begin|>",
    before_name="",
    behind_name=("<|tool_call_argument_begin|>",),
    behind_json=("<|tool_call_end|>",),
    outer=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closing=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    identify=identify,
)
