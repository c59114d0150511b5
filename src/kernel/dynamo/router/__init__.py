"""From a request to the items of its answer: worker pools, dispatch, hand-over, migration, stalls, and the KV feed."""

from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.kv_state import Selection
from dynamo.router.dispatch import Dispatcher, RoutedStream
from dynamo.router.failover import DispatchLimits, DispatchRequest
from dynamo.router.handoff import Handoff, PrefillAnswer
from dynamo.router.kv.queue_gate import QueueGate, RouterRanks
from dynamo.router.kv.router import KvRouter, KvRouterOptions
from dynamo.router.kv_events.feed import KvEventFeed, KvSink
from dynamo.router.pool import ChosenWorker, ModelPool, WorkerClient
from dynamo.router.prefill import PrefillRouter
from dynamo.router.record import DispatchRecord
from dynamo.router.stages import DispatchStage, PrefillStage
from dynamo.router.stall_detector import StallDetector, StallPolicy

__all__ = [
    "ChosenWorker",
    "DispatchLimits",
    "DispatchRecord",
    "DispatchRequest",
    "DispatchStage",
    "Dispatcher",
    "Handoff",
    "KvEventFeed",
    "KvQuery",
    "KvRouter",
    "KvRouterOptions",
    "KvSink",
    "ModelPool",
    "PrefillAnswer",
    "PrefillRouter",
    "PrefillStage",
    "QueueGate",
    "RankInfo",
    "RoutedStream",
    "RouterRanks",
    "Selection",
    "StallDetector",
    "StallPolicy",
    "WorkerClient",
]
