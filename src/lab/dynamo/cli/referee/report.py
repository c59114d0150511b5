"""What every run of the referee writes and prints: the report as text, JSON, HTML and JUnit, its flags, and the exit status."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as xml

from dynamo.cli.referee.checks import BLOCKING, Cause, CheckOutcome, Level, Promise, Result
from dynamo.cli.referee.exchange import Json
from dynamo.cli.usage import UsageError
from dynamo.settings.readers import path, switch
from dynamo.settings.table import setting

if TYPE_CHECKING:
    from dynamo.cli.referee.checks import Promise, Result

EXIT_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """What is written and printed of a run."""

    # fmt: off
    json: Path | None = setting(None, None, path, "Write the report as JSON to this file", flag="--json")
    html: Path | None = setting(None, None, path, "Write the report as one page to this file", flag="--html")
    junit: Path | None = setting(None, None, path, "Write the report for continuous integration to this file",
        flag="--junit")
    schema: bool = setting(False, None, switch, "Print the JSON schema of the report, and leave", flag="--schema",
        negative="")
    list: bool = setting(False, None, switch, "Print the table of checks, and leave", flag="--list", negative="")
    # fmt: on


def printed(options: ReportFlags, checks: Sequence[Promise]) -> bool:
    """Print the table of checks or the schema, where a flag names it; return whether one does."""
    if options.list:
        print(as_table(checks))
    elif options.schema:
        print(json.dumps(SCHEMA, indent=2))
    return options.list or options.schema


def finish(options: ReportFlags, results: Sequence[Result], url: str, model: str) -> int:
    """Write the files, print the report, and return the exit status. Raises UsageError for a file that cannot be written."""
    written: dict[Path | None, Callable[[], str]] = {
        options.json: lambda: json.dumps(as_json(results, url, model), indent=2) + "\n",
        options.html: lambda: as_html(results, url, model),
        options.junit: lambda: as_junit(results),
    }
    for file, made in written.items():
        if file is not None:
            try:
                file.write_text(made(), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    print(as_text(results))
    if core_holds(results):
        return 0
    print("core does not hold: " + why_not(results), file=sys.stderr)
    return EXIT_FAILED


VERSION: Final = 2  # of the JSON report: a member that goes or changes its meaning raises it
_CONTROL: Final = {c: "\ufffd" for c in range(32) if c not in (9, 10, 13)}  # not allowed in XML

_TEXT: Final = {"type": "string"}
_COUNTS: Final = {
    "type": "object",
    "properties": {str(outcome): {"type": "integer", "minimum": 0} for outcome in CheckOutcome},
    "required": [str(outcome) for outcome in CheckOutcome],
}
_CHECK: Final[dict[str, Json]] = {
    "id": _TEXT,
    "level": {"enum": [str(level) for level in Level]},
    "severity": {"enum": ["major", "minor"]},
    "clause": _TEXT,
    "fix": _TEXT,
    "outcome": {"enum": [str(outcome) for outcome in CheckOutcome]},
    "reason": _TEXT,
    "cause": {"enum": [*(str(cause) for cause in Cause), None]},
    "sent": _TEXT,
    "seen": _TEXT,
    "seconds": {"type": "number", "minimum": 0},
}
_REPORT: Final[dict[str, Json]] = {
    "version": {"const": VERSION},
    "url": _TEXT,
    "model": _TEXT,
    "core_passed": {"type": "boolean"},
    "summary": {
        "type": "object",
        "properties": {str(level): _COUNTS for level in Level},
        "required": [str(level) for level in Level],
    },
    "checks": {"type": "array", "items": {"type": "object", "properties": _CHECK, "required": list(_CHECK)}},
}
# Of the JSON report. Members that it does not name may come without a new version.
SCHEMA: Final[dict[str, Json]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Report of dynamo conformance",
    "type": "object",
    "properties": _REPORT,
    "required": list(_REPORT),
}


def summary(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """Count outcomes by level."""
    counts = Counter((r.check.level, r.outcome) for r in results)
    return {str(level): {str(outcome): counts[level, outcome] for outcome in CheckOutcome} for level in Level}


def _breaks_core(result: Result) -> bool:
    is_core = result.check.level is Level.CORE
    return is_core and (result.outcome is CheckOutcome.FAILED or result.cause in BLOCKING)


def core_holds(results: Sequence[Result]) -> bool:
    """Return whether core holds: no core check failed, or could not be judged for a cause that lies with the server."""
    return not any(map(_breaks_core, results))


def why_not(results: Sequence[Result]) -> str:
    """Return how many core checks keep core from holding, and which is the first."""
    broken = [result for result in results if _breaks_core(result)]
    failed = sum(result.outcome is CheckOutcome.FAILED for result in broken)
    return f"{failed} core checks failed, {len(broken) - failed} could not be judged; the first is {broken[0].check.id}"


def as_json(results: Sequence[Result], url: str, model: str) -> dict[str, Json]:
    """Return the report with its stable members (docs/conformance.md)."""
    return {
        "version": VERSION,
        "url": url,
        "model": model,
        "core_passed": core_holds(results),
        "summary": summary(results),
        "checks": [
            {
                "id": r.check.id,
                "level": str(r.check.level),
                "severity": r.check.severity,
                "clause": r.check.clause,
                "fix": r.check.fix,
                "outcome": str(r.outcome),
                "reason": r.reason,
                "cause": r.cause and str(r.cause),
                "sent": r.sent,
                "seen": r.seen,
                "seconds": round(r.seconds, 3),
            }
            for r in results
        ],
    }


def as_text(results: Sequence[Result]) -> str:
    """Return a line for each check that did not pass, and the counts."""
    lines = []
    for r in results:
        if r.outcome is not CheckOutcome.SKIPPED:
            lines.append(f"{r.outcome:12}  {r.check.level:14}  {r.check.id}" + (f": {r.reason}" if r.reason else ""))
        if r.outcome is CheckOutcome.FAILED:
            lines += [f"    promise: {r.check.clause}", f"    mend: {r.check.fix}"]
    for level, counts in summary(results).items():
        lines.append(f"{level}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    return "\n".join(lines)


def as_html(results: Sequence[Result], url: str, model: str) -> str:
    """Return one page without anything from elsewhere."""
    rows = "".join(
        f"<tr class='{r.outcome.name.lower()}'><td>{escape(r.check.id)}<td>{r.check.level}<td>{r.check.severity}"
        f"<td>{r.outcome}<td>{escape(r.reason)}<details><summary>{escape(r.check.clause)}</summary>"
        f"<p>{escape(r.check.fix)}</p><pre>{escape(r.sent)}</pre><pre>{escape(r.seen)}</pre></details>"
        for r in results
    )
    return (
        "<!doctype html><meta charset='utf-8'><title>Conformance</title><style>body{font:15px sans-serif;margin:2em}"
        "td,th{text-align:left;vertical-align:top;padding:.3em .8em;border-top:1px solid #ccc}"
        "pre{white-space:pre-wrap;background:#f4f4f4;padding:.5em}.failed td:nth-child(4){color:#b00020}"
        ".passed td:nth-child(4){color:#1b6e2e}</style>"
        f"<h1>Conformance of {escape(url)}</h1><p>{f'Model {escape(model)}. ' if model else ''}"
        f"{'Core holds.' if core_holds(results) else f'Core does not hold: {escape(why_not(results))}.'}</p>"
        f"<table><tr><th>Check<th>Level<th>Severity<th>Outcome<th>Why{rows}</table>\n"
    )


def as_junit(results: Sequence[Result]) -> str:
    """Return the report for continuous integration."""
    failed = sum(r.outcome is CheckOutcome.FAILED for r in results)
    quiet = sum(r.outcome in (CheckOutcome.SKIPPED, CheckOutcome.CANNOT_JUDGE) for r in results)
    suite = xml.Element(
        "testsuite", name="conformance", tests=str(len(results)), failures=str(failed), skipped=str(quiet)
    )
    for r in results:
        case = xml.SubElement(suite, "testcase", classname=str(r.check.level), name=r.check.id, time=f"{r.seconds:.3f}")
        if r.outcome is CheckOutcome.FAILED:
            found = xml.SubElement(case, "failure", message=r.reason.translate(_CONTROL))
            text = f"{r.check.clause}\n{r.check.fix}\n\n{r.sent}\n\n{r.seen}"
            found.text = text.translate(_CONTROL)
        elif r.outcome is not CheckOutcome.PASSED:
            xml.SubElement(case, "skipped", message=f"{r.outcome}: {r.reason}".translate(_CONTROL))
    return xml.tostring(suite, encoding="unicode") + "\n"


def as_table(checks: Sequence[Promise]) -> str:
    """Return the checks as a table of Markdown."""
    lines = ["| Check | Level | Severity | Promise |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{c.id}` | {c.level} | {c.severity} | {c.clause} |" for c in checks)])
