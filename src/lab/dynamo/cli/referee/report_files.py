"""What every run of the referee writes and prints: its flags, the files, and the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    from dynamo.cli.referee import report

    if options.list:
        print(report.as_table(checks))
    elif options.schema:
        print(json.dumps(report.SCHEMA, indent=2))
    return options.list or options.schema


def finish(options: ReportFlags, results: Sequence[Result], url: str, model: str) -> int:
    """Write the files, print the report, and return the exit status. Raises UsageError for a file that cannot be written."""
    from dynamo.cli.referee import report

    written: dict[Path | None, Callable[[], str]] = {
        options.json: lambda: json.dumps(report.as_json(results, url, model), indent=2) + "\n",
        options.html: lambda: report.as_html(results, url, model),
        options.junit: lambda: report.as_junit(results),
    }
    for file, made in written.items():
        if file is not None:
            try:
                file.write_text(made(), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    print(report.as_text(results))
    if report.core_holds(results):
        return 0
    print("core does not hold: " + report.why_not(results), file=sys.stderr)
    return EXIT_FAILED
