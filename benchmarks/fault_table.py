"""`make fault-table`: what `make test-faults` measured, as the table of `docs/faults.md`.

Every scenario leaves a line in a file of JSON lines (`tests/support/scenario_table.py`). Of several lines of one scenario
the last one counts, so that a scenario can be run again by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "build" / "fault-table.jsonl"
MARK_BEGIN, MARK_END = "<!-- measured -->", "<!-- end -->"
HEAD = ("Scenario", "Requests", "Lost", "Doubled", "Hung", "Recovery p50", "p99", "Note")


def rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The last row of every scenario, in the order of the scenarios' numbers."""
    found = {row["scenario"]: row for row in map(json.loads, lines)}
    return sorted(found.values(), key=lambda row: _order(row["scenario"]))


def table(found: Iterable[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [HEAD, ("---", *("---:",) * 6, "---")]
    for row in found:
        counts = (row[name] for name in ("sent", "lost", "doubled", "hung"))
        lines.append((row["scenario"], *map(str, counts), _time(row["p50_ms"]), _time(row["p99_ms"]), row["note"]))
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def put_into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(MARK_BEGIN)
    _, end, after = rest.partition(MARK_END)
    if not begin or not end:
        raise ValueError(f"{page} has no {MARK_BEGIN} ... {MARK_END}")
    page.write_text(f"{before}{MARK_BEGIN}\n\n{text}\n\n{MARK_END}{after}", encoding="utf-8")


def _order(scenario: str) -> tuple[int, str]:
    number = re.match(r"R(\d+)\b", scenario)
    return (int(number[1]) if number else sys.maxsize, scenario)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:.0f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="fault_table.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "file", nargs="?", type=Path, default=TABLE, help="the lines (default: build/fault-table.jsonl)"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table into this page, between its two marks")
    options = parser.parse_args()
    try:
        found = rows(options.file.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        print(f"there is no {options.file}; run make test-faults first", file=sys.stderr)
        return 2
    print(table(found))
    if options.into is not None:
        try:
            put_into(options.into, table(found))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
