"""Many runs: what was injected, what was found, and the smallest scenario that still shows it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo.simulation.run import Outcome, run_scenario
from dynamo.simulation.scenario import ALL_KINDS, Fault, Kind, Scenario, draw

__all__ = ["Failure", "Report", "shrink", "simulate"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a promise; `smallest` still breaks the same one."""

    outcome: Outcome
    smallest: Outcome

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.outcome.scenario.seed,
            "digest": self.outcome.digest,
            "findings": [{"kind": finding.kind, "text": finding.text} for finding in self.outcome.findings],
            "faults": [str(fault) for fault in self.outcome.fired],
            "faults_that_matter": [str(fault) for fault in self.smallest.scenario.faults],
            "requests_that_matter": [plan.number for plan in self.smallest.scenario.requests],
        }


@dataclass(slots=True)
class Report:
    """What a campaign came to."""

    runs: int = 0
    requests: int = 0
    virtual_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)  # that really happened, by kind
    statuses: Counter[str] = field(default_factory=Counter)  # "-": the client left, or its frontend was killed, before
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.requests += len(outcome.statuses)
        self.virtual_seconds += outcome.virtual_seconds
        self.faults.update(str(fault.kind) for fault in outcome.fired)
        self.statuses.update("-" if status is None else str(status) for status in outcome.statuses)

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "requests": self.requests,
            "virtual_seconds": self.virtual_seconds,
            "faults": dict(sorted(self.faults.items())),
            "statuses": dict(sorted(self.statuses.items())),
            "findings": [failure.to_json() for failure in self.failures],
        }


def simulate(
    runs: int,
    seed: int = 0,
    *,
    kinds: Collection[Kind] = ALL_KINDS,
    max_failures: int = 10,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    faults: Sequence[Fault] | None = None,
) -> Report:
    """Run the seeds `seed` .. `seed + runs - 1`; stops early after `max_failures` failing ones, each shrunk.

    `faults`: these instead of the ones that the seeds draw.
    """
    report = Report()
    gc.collect()
    gc.freeze()  # what is loaded now stays: a collection between two runs then costs next to nothing
    try:
        for number in range(seed, seed + runs):
            outcome = run_scenario(draw(number, kinds, faults=faults))
            report.add(outcome)
            on_outcome(outcome)
            if outcome.findings:
                report.failures.append(Failure(outcome, shrink(outcome)))
                if len(report.failures) >= max_failures:
                    break
            gc.collect()
    finally:
        gc.unfreeze()
    return report


def shrink(outcome: Outcome, run: Callable[[Scenario], Outcome] = run_scenario) -> Outcome:
    """Take away faults and requests, one at a time, as long as the first finding's kind is still found."""
    wanted = outcome.findings[0].kind
    smallest = outcome
    for name in ("faults", "requests"):
        position = 0
        while position < len(getattr(smallest.scenario, name)):
            parts = getattr(smallest.scenario, name)
            fewer = replace(smallest.scenario, **{name: parts[:position] + parts[position + 1 :]})
            attempt = run(fewer)
            if any(finding.kind == wanted for finding in attempt.findings):
                smallest = attempt
            else:
                position += 1
    return smallest
