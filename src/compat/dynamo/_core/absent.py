"""Names of the native module that are loaded at first use, and those that this system does not have."""

from __future__ import annotations

import importlib
from typing import Any, Final

__all__ = ["ABSENT", "ROUTER_NAMES", "load_name"]

_FRONTEND: Final = "run the frontend as a process (python -m dynamo.frontend) or embed dynamo.frontend.Frontend"
_ROUTER: Final = (
    "use dynamo.llm.KvRouter, embed dynamo.router.KvRouter, or run the router as a process (python -m dynamo.router)"
)
_KV_STATE: Final = "KV events travel on the event plane; read them with dynamo.router.KvEventFeed"
_FORWARD_PASS: Final = "forward-pass metrics are not published; register your own with register_prometheus"
_PLANNER: Final = "there is no planner; scale by the workers' /metrics"
_MOCKER: Final = "replay traces with `dynamo bench replay`; serve mock engines with python -m dynamo.mocker"

ABSENT: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            *("EngineType", "EntrypointArgs", "HttpAsyncEngine", "HttpService", "KserveGrpcService"),
            *("FrontendExtensionContext", "FrontendResponse", "FrontendRoute", "RoutedEngine"),
            *("PythonAsyncEngine", "make_engine", "run_input"),
        ),
        _FRONTEND,
    ),
    **dict.fromkeys(
        (
            *("SelectionCacheConfig", "SelectionService", "run_select_service", "run_slot_tracker"),
            "resolve_routing_image_token_id",
        ),
        _ROUTER,
    ),
    **dict.fromkeys(("KvDcRelay", "KvStateAgentHost", "KvStateAttachmentOwner", "run_kv_indexer"), _KV_STATE),
    **dict.fromkeys(("FpmDirectPublisher", "FpmEventRelay", "FpmEventSubscriber"), _FORWARD_PASS),
    **dict.fromkeys(("PlannerDecision", "VirtualConnectorClient", "VirtualConnectorCoordinator"), _PLANNER),
    **dict.fromkeys(("run_mocker_trace_replay", "run_mocker_synthetic_trace_replay"), _MOCKER),
    "FirstTokenSource": "the worker notices the first token itself",
    "LoRADownloader": "give the engine the directory of an adapter",
    "ModelDeploymentCard": "the worker writes the card from WorkerConfig and EngineConfig; see dynamo.protocol.records.ModelCard",
    "ModelCardInstanceId": "an instance is named by endpoint.connection_id()",
    "MultimodalEmbeddingCachePublisher": "embeddings are not cached by this system",
    "ReasoningConfig": "choose a parser with WorkerConfig.reasoning_parser",
    "LLMUnaryClient": "call an endpoint with endpoint.client(); see dynamo.runtime.UnaryClient",
    "UnaryChatModel": "call an endpoint with endpoint.client(); see dynamo.runtime.UnaryClient",
    "AisPerfConfig": "there is no performance model",
    "Instance": "Client.instances() returns dynamo.runtime.client.InstanceView",
    "TransportType": "an instance's transport is dynamo.runtime.client.TransportView",
    "AsyncResponseStream": "a client's answers are dynamo.runtime.client.ClientStream",
    "ResponseSender": "answer by yielding from a handler; see docs/writing-a-backend.md",
    "RuntimeMetrics": "use endpoint.metrics, or dynamo.runtime.observe.metrics for metrics of your own",
    "EngineConfig": "an engine's configuration is dynamo.common.backend.EngineConfig",
    "with_engine_data": "put `engine_data` into a chunk: it reaches clients that ask for it in nvext.extra_fields",
}
"""Name -> what to use in its place."""


ROUTER_NAMES: Final = (
    "ApproxKvIndexer",
    "KvIndexer",
    "KvRouter",
    "KvRouterConfig",
    "LoadThresholdConfig",
    "RouterConfig",
    "RoutingConstraints",
)
"""What is loaded at first use: an engine's worker needs no router."""


def load_name(module: str, name: str) -> Any:
    """Return a name that is loaded late. For a known name that is absent raises ImportError with what to use in its place,
    else AttributeError."""
    if name in ROUTER_NAMES:
        return getattr(importlib.import_module("dynamo.bindings"), name)
    if name in ABSENT:
        raise ImportError(f"{module}.{name} is not part of dynamo-unified; {ABSENT[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
