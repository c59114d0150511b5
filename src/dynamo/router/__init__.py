"""Which worker: the workers of one model in one role, and the hand-over from prefill to decode."""

from dynamo.router.prefill import Handoff, PrefillAnswer, PrefillRouter, may_go_without
from dynamo.router.workers import WorkerClient, WorkerGroup

__all__ = [
    "Handoff",
    "PrefillAnswer",
    "PrefillRouter",
    "WorkerClient",
    "WorkerGroup",
    "may_go_without",
]
