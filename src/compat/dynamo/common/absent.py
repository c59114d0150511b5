"""What the native system has and this one has not, with what to use in its place: names of its native module, and modules.

A name, or a module, that is not in a table here is there.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any, Final

__all__ = ["ABSENT", "MODULES", "ROUTER_NAMES", "load_name"]

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
}
"""Name -> what to use in its place."""

_NIXL: Final = ("transfers between devices over NIXL", "use the package nixl in your engine")
MODULES: Final[dict[str, tuple[str, str]]] = {
    "dynamo.common.http": (
        "an HTTP client for media that checks addresses",
        "media are fetched by the frontend, see dynamo.llm.MediaFetcher: use your own client in an engine",
    ),
    "dynamo.common.protocols": (
        "pydantic models of image, audio and video requests",
        "a RawEngine receives the OpenAI-shaped body as a dict, see dynamo.common.backend.RawRequest",
    ),
    "dynamo.common.storage": (
        "media files in a file system or bucket",
        "use fsspec in your engine, with the arguments --media-output-fs-url and --media-output-http-url",
    ),
    "dynamo.common.snapshot": (
        "checkpoints of a running engine",
        "a worker starts from the files of its model",
    ),
    "dynamo.common.memory": ("a cache of embeddings in torch tensors", "keep embeddings in your engine"),
    "dynamo.common.multimodal": (
        "loaders of media, and transfers of embeddings in torch tensors",
        "a request has its media, see dynamo.common.backend.multimodal.extract_multimodal_kwargs",
    ),
    "dynamo.common.utils.topology": (
        "topology domains from files of a pod",
        "set ModelRuntimeConfig.topology_domains and the kv_transfer_* fields yourself, see dynamo.llm.ModelRuntimeConfig",
    ),
    "dynamo.common.utils.media_nixl": _NIXL,
    "dynamo.nixl_connect": _NIXL,
    "dynamo.common.utils.video_utils": ("frames, and MP4 files of them", "use PyAV in your engine"),
    "dynamo.common.utils.install_media_decoders": (
        "a command that installs decoders",
        "install opencv-python-headless and av with pip",
    ),
    "dynamo.common.utils.output_modalities": (
        "which kinds of answers a model has",
        "WorkerConfig.endpoint_types names what a worker serves, see dynamo.common.utils.endpoint_types",
    ),
    "dynamo.common.configuration.groups": (
        "the flags of the native programs",
        "dynamo.common.backend.args has those of a worker",
    ),
}
"""Module or package -> what it has there, and what to use in its place."""


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


class _Absent:
    """The last finder: it is used for a module that no folder has, and its error names what takes the place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Raise the ImportError of a module that is not part of this system; None for any other."""
        if name in MODULES:
            what, instead = MODULES[name]
            raise ModuleNotFoundError(f"{name} ({what}) is not part of dynamo-unified; {instead}", name=name)
        return None


sys.meta_path.append(_Absent)
