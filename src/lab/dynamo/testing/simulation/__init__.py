"""A whole cluster in one process under virtual time: seeded faults, exact replay, promises checked after every run."""

from dynamo.testing.simulation.campaign import Failure, Report, shrink, simulate
from dynamo.testing.simulation.engine import PrefixEngine, continuation
from dynamo.testing.simulation.loop import NothingWillHappen, OutsideWorld, VirtualLoop, run_virtual
from dynamo.testing.simulation.run import Finding, Outcome, run_scenario
from dynamo.testing.simulation.scenario import ALL_KINDS, Fault, FaultKind, RequestPlan, Scenario, draw

__all__ = [
    "ALL_KINDS",
    "Failure",
    "Fault",
    "FaultKind",
    "Finding",
    "NothingWillHappen",
    "Outcome",
    "OutsideWorld",
    "PrefixEngine",
    "Report",
    "RequestPlan",
    "Scenario",
    "VirtualLoop",
    "continuation",
    "draw",
    "run_scenario",
    "run_virtual",
    "shrink",
    "simulate",
]
