"""Many runs: what was injected, what was found, and the smallest scenario that still shows it."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Final

from dynamo.testing.simulation.run import Outcome, run_scenario
from dynamo.testing.simulation.scenario import ALL_KINDS, Fault, FaultKind, Scenario, draw

Told = tuple[Outcome, Outcome | None]  # a run and, if it failed, the smallest one that fails alike

COLLECT_RUNS: Final = 16  # a run leaves some garbage in circles: enough to be worth a collection, too little to miss


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a promise; `smallest` still breaks the same one."""

    outcome: Outcome
    smallest: Outcome

    def to_json(self) -> dict[str, object]:
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

    def to_json(self) -> dict[str, object]:
        return {
            "runs": self.runs,
            "requests": self.requests,
            "virtual_seconds": self.virtual_seconds,
            "faults": dict(sorted(self.faults.items())),
            "statuses": dict(sorted(self.statuses.items())),
            "findings": [failure.to_json() for failure in self.failures],
        }


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process runs."""

    seeds: range
    kinds: tuple[FaultKind, ...]
    faults: tuple[Fault, ...] | None


def simulate(
    runs: int,
    seed: int = 0,
    *,
    kinds: Collection[FaultKind] = ALL_KINDS,
    max_failures: int = 10,
    jobs: int = 1,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    faults: Sequence[Fault] | None = None,
) -> Report:
    """Run the seeds `seed` .. `seed + runs - 1`; stops early after `max_failures` failing ones, each shrunk.

    `jobs`: how many processes share them. The report is the same, and `on_outcome` is called in the order of the seeds.
    `faults`: these instead of the ones that the seeds draw.
    """
    report = Report()
    work = _Work(range(seed, seed + runs), tuple(sorted(kinds)), None if faults is None else tuple(faults))
    with closing(_tell(work) if jobs == 1 else _tell_from_processes(work, jobs)) as told:
        for outcome, smallest in told:
            report.add(outcome)
            on_outcome(outcome)
            if smallest is not None:
                report.failures.append(Failure(outcome, smallest))
                if len(report.failures) >= max_failures:
                    break
    return report


def _tell(work: _Work) -> Generator[Told, None, None]:
    gc.collect()
    gc.freeze()  # what is loaded now stays: a collection between two runs then costs next to nothing
    try:
        for count, seed in enumerate(work.seeds, 1):
            outcome = run_scenario(draw(seed, work.kinds, faults=work.faults))
            yield outcome, shrink(outcome) if outcome.findings else None
            if count % COLLECT_RUNS == 0:
                gc.collect()
    finally:
        gc.unfreeze()


def _tell_from_processes(work: _Work, jobs: int) -> Generator[Told, None, None]:
    """Yield the results of all processes. Each process runs every `jobs`th seed, and waits while its pipe is full."""
    spawn = multiprocessing.get_context("spawn")
    seeds, processes, ends = work.seeds, [], []
    try:
        for job in range(jobs):
            ours, theirs = spawn.Pipe(duplex=False)
            ends.append(ours)
            process = spawn.Process(target=_job, args=(theirs, replace(work, seeds=seeds[job::jobs])), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # so that the pipe ends with the process
        for position in range(len(seeds)):
            try:
                yield ends[position % jobs].recv()
            except EOFError:
                raise RuntimeError(f"the process that ran seed {seeds[position]} ended without a result") from None
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.terminate()
            process.join()


def _job(results: Connection, work: _Work) -> None:
    """Run the part of one process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, and ends this process
    with closing(_tell(work)) as told:
        for each in told:
            try:
                results.send(each)
            except BrokenPipeError:
                return  # the parent is gone


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
