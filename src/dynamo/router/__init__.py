"""Which worker: the workers of one model in one role, the hand-over from prefill to decode, what workers' caches hold."""

from dynamo.router.kv_feed import KvEventFeed, KvSink
from dynamo.router.pool import ChosenWorker, WorkerClient, WorkerPool
from dynamo.router.prefill import Handoff, PrefillAnswer, PrefillRouter, may_go_without

__all__ = [
    "ChosenWorker",
    "Handoff",
    "KvEventFeed",
    "KvSink",
    "PrefillAnswer",
    "PrefillRouter",
    "WorkerClient",
    "WorkerPool",
    "may_go_without",
]
