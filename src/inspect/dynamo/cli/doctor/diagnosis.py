"""What a check finds, and what the checks are given."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo.cli.inspect.client import InspectorClient
from dynamo.frontend.settings import FrontendSettings


class CheckLevel(enum.IntEnum):
    """How bad it is; the worst decides the exit status."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: what was checked, what is so, and what to do about it."""

    level: CheckLevel
    finding: str
    advice: str = ""

    @staticmethod
    def ok(finding: str) -> Diagnosis:
        """Make a finding that is as it should be."""
        return Diagnosis(CheckLevel.OK, finding)

    @staticmethod
    def warn(finding: str, advice: str) -> Diagnosis:
        """Make a finding that may hurt."""
        return Diagnosis(CheckLevel.WARNING, finding, advice)

    @staticmethod
    def bad(finding: str, advice: str) -> Diagnosis:
        """Make a finding that keeps something from working."""
        return Diagnosis(CheckLevel.ERROR, finding, advice)


@dataclass(frozen=True, slots=True)
class Examined:
    """What the checks read: settings as a frontend of this environment would read them, and a frontend that may run."""

    env: Mapping[str, str]
    settings: FrontendSettings
    client: InspectorClient
    port: int
    names_frontend: bool = False  # the operator named one, so one should answer
    proc: Path = Path("/proc")
