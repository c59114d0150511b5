"""Which worker serves a request: a pure decision over candidate records. No I/O: time and chance are arguments."""

from dynamo.placement.candidates import (
    Candidate,
    CandidateList,
    Placement,
    PlacementReason,
    PlacementRequest,
    WorkerKey,
    eligible,
    place,
)
from dynamo.placement.circuit_breaker import CircuitBreaker
from dynamo.placement.load import Booking, LoadBook
from dynamo.placement.policies import Policy, RouterMode, policy_for

__all__ = [
    "Booking",
    "Candidate",
    "CandidateList",
    "CircuitBreaker",
    "LoadBook",
    "Placement",
    "PlacementReason",
    "PlacementRequest",
    "Policy",
    "RouterMode",
    "WorkerKey",
    "eligible",
    "place",
    "policy_for",
]
