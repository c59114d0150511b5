"""`dynamo simulate`: run a cluster under virtual time with seeded faults, and report which promises broke."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dynamo.cli.usage import UsageError
from dynamo.frontend.base.offload import processors
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import integer, path, placeholder, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

if TYPE_CHECKING:
    from dynamo.chaos.plan import Fault

EXIT_FINDINGS: Final = 1
MAX_JOBS: Final = 256
MAX_REPLAY_BYTES: Final = 16 * 1024 * 1024
RUNS_WORTH_A_PROCESS: Final = 50  # a process takes about as long to start as for so many runs

_EPILOG: Final = """\
Every run is a cluster of its own: frontends, workers, clients and faults drawn from the seed. The same seed is the same
run, on any machine. A failing seed is shrunk to the faults and requests that matter. Exit status: 0 every promise was
kept (with --replay: every decision is the recorded one), 1 one was not, 2 an error of use.

example:
  dynamo simulate --runs 1000
  dynamo simulate --runs 1 --seed 42 --trace
  dynamo simulate --seed 42 --print-plan > plan.toml
  dynamo simulate --runs 1 --seed 42 --plan plan.toml
  dynamo simulate --replay bundle.json
"""


@dataclass(frozen=True, slots=True)
class SimulateFlags:
    """Which runs, and what to write of them."""

    # fmt: off
    runs: int = setting(100, None, integer(1), "How many seeds to run", flag="--runs")
    seed: int = setting(0, None, integer(), "The first seed", flag="--seed")
    jobs: int | None = setting(None, None, integer(1, MAX_JOBS), "How many processes share the runs", flag="--jobs",
        shown="one per processor")
    faults: str | None = setting(None, None, placeholder("KINDS", text), "Kinds of faults, a comma list, or `none`",
        flag="--faults", shown="all")
    plan: Path | None = setting(None, None, path, "A [chaos plan](chaos.md): its faults in place of drawn ones",
        flag="--plan")
    print_plan: bool = setting(False, None, switch, "Print the faults of `--seed` as a chaos plan, and leave",
        flag="--print-plan", negative="")
    json: Path | None = setting(None, None, path, "Write the report to this file, too", flag="--json")
    replay: Path | None = setting(None, None, path, "Run the courses of a [failure bundle](recording.md#failed-requests) "
        "again, decide each step anew, and leave", flag="--replay")
    trace: bool = setting(False, None, switch, "Print what happened in every run, line by line", flag="--trace",
        negative="")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo simulate", description="Simulate clusters with seeded faults, under virtual time.", epilog=_EPILOG
    )
    add_flags(parser, (made for _, made in settings_of(SimulateFlags)), {})
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the campaign; the exit status."""
    given = build_parser().parse_args(list(argv))
    options = read_settings(SimulateFlags, {}, vars(given))
    if options.replay is not None:
        return _replay(options.replay)

    from dynamo.chaos.plan import plan_text
    from dynamo.testing.simulation import ALL_KINDS, FaultKind, Outcome, draw, run_scenario, simulate

    kinds = ALL_KINDS
    if options.faults is not None:
        names = [] if options.faults == "none" else options.faults.split(",")
        unknown = sorted(set(names) - {str(kind) for kind in FaultKind})
        if unknown:
            raise UsageError(f"--faults: there is no kind {unknown[0]!r}; use {', '.join(sorted(FaultKind))}, or none")
        kinds = frozenset(map(FaultKind, names))
    if options.print_plan:
        print(f"# {_again(options.seed, options.faults)} --plan FILE")
        print(plan_text(draw(options.seed, kinds).faults), end="")
        return 0
    faults = None if options.plan is None else _plan(options.plan)

    def show(outcome: Outcome) -> None:
        if options.trace:
            print(f"seed {outcome.scenario.seed}  digest {outcome.digest}")
            for line in run_scenario(outcome.scenario, keep_trace=True).trace:
                print(" ", line)

    began = time.perf_counter()
    jobs = options.jobs or min(processors(), -(-options.runs // RUNS_WORTH_A_PROCESS))
    report = simulate(options.runs, options.seed, kinds=kinds, jobs=jobs, on_outcome=show, faults=faults)
    seconds = time.perf_counter() - began
    if options.json is not None:
        try:
            options.json.write_text(json.dumps({**report.to_json(), "seconds": seconds}, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--json: cannot write {options.json}: {error}") from error
    for failure in report.failures:
        print(f"seed {failure.outcome.scenario.seed}  digest {failure.outcome.digest}")
        for finding in failure.outcome.findings[:5]:
            print(f"  {finding}")
        for fault in failure.smallest.scenario.faults:
            print(f"  needs {fault}")
        print(
            f"  needs requests {', '.join(str(plan.number) for plan in failure.smallest.scenario.requests) or 'none'}"
        )
    print(
        f"{report.runs} runs, {report.requests} requests, {sum(report.faults.values())} faults, "
        f"{len(report.failures)} failing seeds, {report.virtual_seconds / 3600:.1f} h simulated in {seconds:.1f} s"
    )
    print("faults:", ", ".join(f"{kind} {count}" for kind, count in sorted(report.faults.items())) or "none")
    print("answers:", ", ".join(f"{status} {count}" for status, count in sorted(report.statuses.items())))
    if report.failures:
        plan = "" if options.plan is None else f" --plan {options.plan}"
        print(f"replay one with: {_again(report.failures[0].outcome.scenario.seed, options.faults)}{plan} --trace")
        sys.stdout.flush()
        return EXIT_FINDINGS
    return 0


def _replay(path: Path) -> int:
    """Show how the requests of a file were decided, each step decided anew; return the exit status."""
    from dynamo.router.dispatch.course_log import read_courses, replay, step_line

    try:
        with path.open("rb") as file:
            runs = [(course, replay(course)) for course in read_courses(file.read(MAX_REPLAY_BYTES))]
    except (OSError, ValueError) as error:
        raise UsageError(f"--replay: {path}: {error}") from None
    differences = 0
    for number, (course, steps) in enumerate(runs, 1):
        print(f"course {number}: {course.rules.role}, {course.rules.retries} retries, {course.state or 'unknown'}")
        for step, recorded in zip(steps, course.steps, strict=True):
            print(" ", step_line(step))
            if step != recorded:
                differences += 1
                print(f"  but then it was: {json.dumps(recorded.then)}")
    print(f"{len(runs)} courses, {sum(len(steps) for _, steps in runs)} steps, {differences} decided otherwise")
    return EXIT_FINDINGS if differences else 0


def _again(seed: int, faults: str | None) -> str:
    kinds = "" if faults is None else f" --faults {faults}"
    return f"dynamo simulate --runs 1 --seed {seed}{kinds}"


def _plan(path: Path) -> tuple[Fault, ...]:
    from dynamo.chaos.plan import InvalidPlan, read_plan

    try:
        faults = read_plan(path)
    except InvalidPlan as error:
        raise UsageError(f"--plan: {error}") from None
    for number, fault in enumerate(faults, 1):
        for field, is_used in (
            ("id", fault.request_id is not None),
            ("metadata", bool(fault.metadata)),
            ("times", fault.times != 1),
        ):
            if is_used:
                raise UsageError(
                    f"--plan: {path}: fault {number}: {field} is for real processes; a simulated fault names a request by its "
                    "number, and fires once"
                )
    return faults
