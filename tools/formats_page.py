"""Write the tables of tool-call and reasoning formats of docs/tools-and-reasoning.md from the code: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from pages import write_page

from dynamo.text.formats import TOOL_FORMATS
from dynamo.text.formats.reasoning import REASONING_FORMATS

PAGE: Final = Path(__file__).parent.parent / "docs" / "tools-and-reasoning.md"

_TABLE: Final = re.compile(r"(<!-- table: (tools|reasoning) -->\n)(?:\|.*\n)*")


def table(kind: str) -> str:
    """Return the names of every format and what it looks like."""
    lines = [f"| {'Tool-call' if kind == 'tools' else 'Reasoning'} parser | Format |", "|---|---|"]
    descriptions = {
        name: form.description for name, form in (TOOL_FORMATS if kind == "tools" else REASONING_FORMATS).items()
    }
    for description in dict.fromkeys(descriptions.values()):
        names = ", ".join(f"`{name}`" for name, one in descriptions.items() if one == description)
        lines.append(f"| {names} | {description.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with its tables as the code has them. Raises ValueError when a table has no place."""
    if {match[2] for match in _TABLE.finditer(page)} != {"tools", "reasoning"}:
        raise ValueError("the page has no place for both tables")
    return _TABLE.sub(lambda match: match[1] + table(match[2]), page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))
