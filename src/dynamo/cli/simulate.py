"""`dynamo simulate`: run a cluster under virtual time with seeded faults, and say which promises broke."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dynamo.cli.usage import CommandParser, UsageError

__all__ = ["main"]

EXIT_FINDINGS: Final = 1

_EPILOG: Final = """\
Every run is a cluster of its own: frontends, workers, clients and faults drawn from the seed. The same seed is the same
run, on any machine. A failing seed is shrunk to the faults and requests that matter. Exit status: 0 every promise was
kept, 1 one was broken, 2 an error of use.

example:
  dynamo simulate --runs 1000
  dynamo simulate --runs 1 --seed 42 --trace
"""


def main(argv: Sequence[str]) -> int:
    """Run the campaign; the exit status."""
    parser = CommandParser(
        "dynamo simulate", description="Simulate clusters with seeded faults, under virtual time.", epilog=_EPILOG
    )
    parser.add_argument("--runs", type=int, default=100, help="how many seeds to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--faults", metavar="KINDS", help="comma list of kinds, or none (default: all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there, too")
    parser.add_argument("--trace", action="store_true", help="print what happened in every run, line by line")
    options = parser.parse_args(list(argv))
    if options.runs < 1:
        raise UsageError(f"--runs must be at least 1, got {options.runs}")

    from dynamo.simulation import ALL_KINDS, Kind, Outcome, draw, run_scenario, simulate

    kinds = ALL_KINDS
    if options.faults is not None:
        names = [] if options.faults == "none" else options.faults.split(",")
        unknown = sorted(set(names) - {str(kind) for kind in Kind})
        if unknown:
            raise UsageError(f"--faults: there is no kind {unknown[0]!r}; use {', '.join(sorted(Kind))}, or none")
        kinds = frozenset(map(Kind, names))

    def show(outcome: Outcome) -> None:
        if options.trace:
            print(f"seed {outcome.scenario.seed}  digest {outcome.digest}")
            for line in run_scenario(draw(outcome.scenario.seed, kinds), keep_trace=True).trace:
                print(" ", line)

    began = time.perf_counter()
    report = simulate(options.runs, options.seed, kinds=kinds, on_outcome=show)
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
        print(f"replay one with: dynamo simulate --runs 1 --trace --seed {report.failures[0].outcome.scenario.seed}")
        sys.stdout.flush()
        return EXIT_FINDINGS
    return 0
