"""A whole cluster in one process under virtual time: seeded faults, exact replay, promises checked after every run."""

from dynamo.simulation.loop import VirtualLoop, run_virtual
from dynamo.simulation.run import Finding, Outcome, run_scenario
from dynamo.simulation.scenario import Fault, Kind, Scenario, draw

__all__ = ["Fault", "Finding", "Kind", "Outcome", "Scenario", "VirtualLoop", "draw", "run_scenario", "run_virtual"]
