"""Fault injection: one plan for the simulation and for real processes. Nothing here is loaded without a plan."""

from dynamo.chaos.plan import ALL_KINDS, Fault, FaultKind, InvalidPlan, parse_plan, plan_text, read_plan

__all__ = ["ALL_KINDS", "Fault", "FaultKind", "InvalidPlan", "parse_plan", "plan_text", "read_plan"]
