"""From a request to the items of its answer: worker pools, dispatch, hand-over, migration, stalls, and the KV feed."""

from dynamo.placement.kv_query import KvQuery, RankInfo
from dynamo.placement.kv_state import Selection
from dynamo.router.dispatch.failover import DispatchLimits, DispatchRequest
from dynamo.router.dispatch.handoff import Handoff, PrefillAnswer
from dynamo.router.dispatch.prefill import PrefillRouter
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.dispatch.stages import DispatchStage, PrefillStage
from dynamo.router.dispatch.stall_detector import StallDetector, StallPolicy
from dynamo.router.dispatch.stream import Dispatcher, RoutedStream
from dynamo.router.kv.queue_gate import QueueGate, RouterRanks
from dynamo.router.kv.router import KvRouter, KvRouterOptions
from dynamo.router.kv_events.feed import KvEventFeed, KvSink
from dynamo.router.workers.pool import ChosenWorker, ModelPool, WorkerClient

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
