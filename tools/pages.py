"""Pages of docs/ whose tables are written from the code: write one, or look whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_page"]


def write_page(page: Path, written: Callable[[str], str]) -> int:
    """Write the page as `written` makes it of its text; with `--check` only compare. Return 1 when it is not current."""
    text = page.read_text()
    fresh = written(text)
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    page.write_text(fresh)
    return 0
