"""What happened in one run: requests, faults, broken promises, and a trace whose digest two runs of a seed share."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final

from dynamo.testing.simulation.client import Visit
from dynamo.testing.simulation.engine import Step
from dynamo.testing.simulation.scenario import Fault, RequestPlan, Scenario

FIRST_PROBE: Final = 1000  # from this number on requests are not a client's, and nothing is done to them
_CHANCE_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PROMPT: Final = re.compile(rb"<(\d+)>")


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class RunRecord:
    """Kept by the run, read by the checks."""

    def __init__(self, scenario: Scenario, *, keep_trace: bool) -> None:
        self.scenario = scenario
        self.findings: list[Finding] = []
        self.fired: list[Fault] = []
        self.trace: list[str] = []
        self.visits: dict[int, Visit] = {}
        self.prompts: dict[int, bytes] = {}
        self.dispatched: set[int] = set()  # requests that reached a worker's wire
        self._keep_trace = keep_trace
        self._hash = blake2b(digest_size=16)

    def note(self, event: str, *details: object) -> None:
        """Add one line to the trace."""
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:
            now = 0.0
        line = f"{now:.6f} {event} {' '.join(map(str, details))}"
        self._hash.update(line.encode())
        if self._keep_trace:
            self.trace.append(line)

    def breach(self, kind: str, text: str) -> None:
        text = _CHANCE_ID.sub("<id>", text)  # ids are the one thing that two runs of a seed do not share
        self.note("finding", kind, text)
        self.findings.append(Finding(kind, text))

    @cached_property
    def plans(self) -> dict[int, RequestPlan]:
        """The requests by their numbers; the last one of a run is added at its end."""
        return {plan.number: plan for plan in self.scenario.requests}

    def digest(self) -> str:
        return self._hash.hexdigest()

    def tokens_per_chunk(self, step: Step) -> int:
        return self.plan_of(bytes(step.prompt)).tokens_per_chunk

    def plan_of(self, prompt: bytes) -> RequestPlan:
        found = _PROMPT.search(prompt)
        assert found is not None, prompt
        return self.plans[int(found[1])]
