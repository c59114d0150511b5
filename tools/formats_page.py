"""Write the table of tool-call formats of docs/tools-and-reasoning.md from the code: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from pages import write_page

from dynamo.text.formats import TOOL_FORMATS

PAGE: Final = Path(__file__).parent.parent / "docs" / "tools-and-reasoning.md"

_TABLE: Final = re.compile(r"(<!-- table: tools -->\n)(?:\|.*\n)*")


def tools_table() -> str:
    """Return the names of every tool-call format and what it looks like."""
    lines = ["| Tool-call parser | Format |", "|---|---|"]
    for form in dict.fromkeys(TOOL_FORMATS.values()):
        names = ", ".join(f"`{name}`" for name, one in TOOL_FORMATS.items() if one is form)
        lines.append(f"| {names} | {form.description.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with the table as the code has it. Raises ValueError when the table has no place."""
    if _TABLE.search(page) is None:
        raise ValueError("the page has no place for the table of tool-call formats")
    return _TABLE.sub(lambda match: match[1] + tools_table(), page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))
