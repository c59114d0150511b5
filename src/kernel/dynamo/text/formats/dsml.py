"""DSML, the tags of DeepSeek V3.2 and later.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="search">
    <｜DSML｜parameter name="query" string="true">rain</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

The versions differ in the outer tag and in a space; models mix them up and damage the bars. So one format reads them all.
"""

from __future__ import annotations

from itertools import product
from typing import Final

from dynamo.text.formats.xml_calls import TaggedXml

__all__ = ["dsml"]

_BARS: Final = ("｜", "|", "‖", "｜｜", "||")
_OUTER: Final = ("function_calls", "tool_calls", "toolcalls", "calls", "tool")


def dsml(word: str = "DSML", outer: str = "function_calls", space: str = "") -> TaggedXml:
    """Return the format; `outer` and `space` are those of the version, and the rest is read too."""
    heads = [f"{bar}{word}{bar}{gap}" for bar, gap in product(_BARS, ("", " "))]
    first = f"｜{word}｜{space}"
    heads.sort(key=lambda head: head != first)  # the version's own spelling first
    names = sorted(_OUTER, key=lambda name: name != outer)
    return TaggedXml(
        outer=tuple(f"<{head}{name}>" for head, name in product(heads, names)),
        closing=tuple(f"</{head}{name}>" for head, name in product(heads, names)),
        invoke=tuple(f"<{head}invoke" for head in heads),
        invoke_end=tuple(f"</{head}invoke>" for head in heads),
        parameter=tuple(f"<{head}parameter" for head in heads),
        parameter_end=tuple(f"</{head}parameter>" for head in heads),
        has_attributes=True,
        reads_json=True,
        prefixes=tuple(f"<{bar}{word}{bar}" for bar in _BARS),
    )
