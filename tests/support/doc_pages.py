"""The project's own documents, taken apart: fenced blocks with the mark above them, tables, headings, prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass
class Block:
    """A fenced block and the HTML comment above it."""

    language: str
    text: str
    mark: str
    line: int


@dataclass
class Page:
    path: Path
    blocks: list[Block] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)  # rows of cells, the heading first
    headings: list[str] = field(default_factory=list)
    prose: str = ""

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


def read(path: Path) -> Page:
    page, lines = Page(path), iter(enumerate(path.read_text().splitlines(), 1))
    mark, table, prose = "", [], []
    for number, line in lines:
        if line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                body.append(inner)
            page.blocks.append(Block(line.removeprefix("```").strip(), "\n".join(body) + "\n", mark, number))
            mark = ""
            continue
        prose.append(line)
        found = re.fullmatch(r"<!-- (.*) -->", line.strip())
        if found:
            mark = found[1]
        elif line.strip():
            mark = ""
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not set(line) <= set("|-: "):
                table.append(cells)
        elif table:
            page.tables.append(table)
            table = []
        if line.startswith("#"):
            page.headings.append(line.lstrip("#").strip())
    if table:
        page.tables.append(table)
    page.prose = "\n".join(prose)
    return page


READ = {path.name: read(path) for path in PAGES}


def rows(page: str, *columns: str) -> Iterator[list[str]]:
    """The rows of every table of a page whose heading begins with `columns`."""
    for table in READ[page].tables:
        if tuple(table[0][: len(columns)]) == columns:
            yield from table[1:]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
