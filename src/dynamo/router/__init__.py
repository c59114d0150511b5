"""Which worker: the workers of one model in one role, the hand-over from prefill to decode, what workers' caches hold."""

from dynamo.router.kv_feed import KvEventFeed, KvSink
from dynamo.router.prefill import Handoff, PrefillAnswer, PrefillRouter, may_go_without
from dynamo.router.workers import WorkerClient, WorkerGroup

__all__ = [
    "Handoff",
    "KvEventFeed",
    "KvSink",
    "PrefillAnswer",
    "PrefillRouter",
    "WorkerClient",
    "WorkerGroup",
    "may_go_without",
]
