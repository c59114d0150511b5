"""The KV router, the selection service and the forward-pass metrics of the native bindings, as `dynamo.llm` and
`dynamo._core` have them: thin classes over router, placement and the event plane.

For code that was written against them. New code uses `dynamo.router`.
"""

from dynamo.bindings.config import KvRouterConfig, LoadThresholdConfig, RouterConfig, TaintConstraints
from dynamo.bindings.first_token import FirstTokenSource
from dynamo.bindings.forward_pass import FpmDirectPublisher, FpmEventRelay, FpmEventSubscriber
from dynamo.bindings.indexers import ApproxKvIndexer, KvIndexer
from dynamo.bindings.kv_router import ChunkStream, EndpointKvRouter
from dynamo.bindings.selection import SelectionCacheConfig, SelectionService
from dynamo.bindings.unary import LLMUnaryClient, UnaryChatModel
from dynamo.runtime.endpoint import EndpointMetricsAccess

KvRouter = EndpointKvRouter
RoutingConstraints = TaintConstraints
RuntimeMetrics = EndpointMetricsAccess

__all__ = [
    "ApproxKvIndexer", "ChunkStream", "FirstTokenSource", "FpmDirectPublisher", "FpmEventRelay", "FpmEventSubscriber", "KvIndexer",
    "KvRouter", "KvRouterConfig", "LLMUnaryClient", "LoadThresholdConfig", "RouterConfig", "RoutingConstraints", "RuntimeMetrics",
    "SelectionCacheConfig", "SelectionService", "UnaryChatModel",
]  # fmt: skip
