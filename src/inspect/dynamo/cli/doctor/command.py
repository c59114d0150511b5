"""`dynamo doctor`: run every check, and report what to do about what it finds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dynamo.cli.doctor.certificates import certificates
from dynamo.cli.doctor.diagnosis import CheckLevel, Diagnosis, Examined
from dynamo.cli.doctor.installed import leftovers, versions
from dynamo.cli.doctor.machine import clocks, disks, files, loopback, processors, shared_memory
from dynamo.cli.doctor.network import discovery, frontend, nats, ports
from dynamo.cli.doctor.variables import read_frontend_settings, variables
from dynamo.cli.inspect.flags import InspectFlags
from dynamo.cli.inspect.printable import printable
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import switch
from dynamo.settings.table import read_settings, setting, settings_of

CHECKS: Final[Mapping[str, Callable[[Examined], Iterator[Diagnosis]]]] = {
    "versions": versions,
    "clock": clocks,
    "open files": files,
    "disk": disks,
    "shared memory": shared_memory,
    "processors": processors,
    "loopback": loopback,
    "settings": variables,
    "certificates": certificates,
    "ports": ports,
    "discovery": discovery,
    "NATS": nats,
    "frontend": frontend,
    "leftovers": leftovers,
}

_WORDS: Final = {CheckLevel.OK: "ok", CheckLevel.WARNING: "warning", CheckLevel.ERROR: "ERROR"}
_DESCRIPTION: Final = (
    "Examine this machine, its settings and what they lead to; say what is wrong and what to do about it."
)
_EPILOG: Final = """\
It reads the variables that a frontend started here would read, changes nothing, and needs no frontend. Where one runs, it is
asked what it thinks is wrong.

exit status:
  0  all is well
  1  there are warnings
  2  there are errors: something will not work (also: a mistake in the command line)

example:
  dynamo doctor --all
  dynamo doctor --json | jq '.findings[] | select(.level != "ok")'
"""


@dataclass(frozen=True, slots=True)
class DoctorFlags(InspectFlags):
    """What to examine, and in which form to answer."""

    # fmt: off
    all: bool = setting(False, None, switch, "Show also what is as it should be", flag="--all", negative="")
    json: bool = setting(False, None, switch, "Write JSON", flag="--json", negative="")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo doctor", description=_DESCRIPTION, epilog=_EPILOG)
    add_flags(parser, (made for _, made in settings_of(DoctorFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Examine, and show what was found; return the exit status."""
    parsed = build_parser(os.environ).parse_args(argv)
    flags = read_settings(DoctorFlags, os.environ, vars(parsed))
    settings = read_frontend_settings(os.environ)
    examined = Examined(os.environ, settings, flags.client(), flags.port, names_frontend=bool(parsed.url))
    found = list(examine(examined, CHECKS))
    worst = max(diagnosis.level for _, diagnosis in found)
    if flags.json:
        findings = [
            {"check": check, "level": _WORDS[one.level].lower(), "finding": one.finding, "advice": one.advice}
            for check, one in found
        ]
        print(json.dumps({"status": _WORDS[worst].lower(), "findings": findings}))
    else:
        print("\n".join(_lines(found, everything=flags.all)))
    return int(worst)


def examine(
    examined: Examined, checks: Mapping[str, Callable[[Examined], Iterable[Diagnosis]]]
) -> Iterator[tuple[str, Diagnosis]]:
    """Run the checks. One that fails itself is an error that names it, and the others go on."""
    for name, check in checks.items():
        try:
            for diagnosis in check(examined):
                yield name, diagnosis
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            yield name, Diagnosis.bad(text, "report this: a check must not fail")


def _lines(found: list[tuple[str, Diagnosis]], *, everything: bool) -> Iterator[str]:
    for check, one in found:
        if one.level is CheckLevel.OK and not everything:
            continue
        yield printable(f"{_WORDS[one.level]:8} {check}: {one.finding}")
        if one.advice:
            yield printable(f"         -> {one.advice}")
    counts = {level: sum(one.level is level for _, one in found) for level in CheckLevel}
    yield (
        f"{counts[CheckLevel.ERROR]} errors, {counts[CheckLevel.WARNING]} warnings, {counts[CheckLevel.OK]} findings ok"
        + ("" if everything else " (--all shows them)")
    )
