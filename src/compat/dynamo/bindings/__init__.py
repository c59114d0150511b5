"""The KV router of the native bindings, as `dynamo.llm` and `dynamo._core` have it: thin classes over router and placement.

For code that was written against them. New code uses `dynamo.router`.
"""

from dynamo.bindings.config import KvRouterConfig, LoadThresholdConfig, RouterConfig, TaintConstraints
from dynamo.bindings.indexers import ApproxKvIndexer, KvIndexer
from dynamo.bindings.kv_router import ChunkStream, EndpointKvRouter

KvRouter = EndpointKvRouter
RoutingConstraints = TaintConstraints

__all__ = [
    "ApproxKvIndexer",
    "ChunkStream",
    "KvIndexer",
    "KvRouter",
    "KvRouterConfig",
    "LoadThresholdConfig",
    "RouterConfig",
    "RoutingConstraints",
]
