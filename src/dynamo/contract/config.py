"""How one worker is deployed: names, planes, role. And the environment a runtime is created in."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Self, TypedDict, Unpack

from dynamo.contract.health_check import parse_health_check_payload_cli
from dynamo.contract.modes import DisaggregationMode, coerce_disaggregation_mode
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.structural_tag import TAG_SCHEMAS, TAG_SCOPES, check_structural_tag

__all__ = [
    "DEFAULT_COMPONENT",
    "DEFAULT_ENDPOINT",
    "DEFAULT_ENDPOINT_TYPES",
    "RESPONSE_PLANES",
    "RuntimeConfig",
    "WorkerConfig",
    "WorkerFields",
]

DEFAULT_COMPONENT: Final = "backend"
DEFAULT_ENDPOINT: Final = "generate"
DEFAULT_ENDPOINT_TYPES: Final = "chat,completions"
RESPONSE_PLANES: Final = ("tcp", "quic")

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "structural_tag_mode": ("off", "on"),
    "structural_tag_scope": TAG_SCOPES,
    "structural_tag_schema": TAG_SCHEMAS,
}


class _Overrides(TypedDict, total=False):
    """The fields of `WorkerConfig` without those that are parameters of `from_runtime_config`."""

    namespace: str
    component: str
    endpoint: str
    endpoint_types: str
    discovery_backend: str
    request_plane: str
    event_plane: str | None
    use_kv_events: bool
    custom_jinja_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    exclude_tools_when_tool_choice_none: bool
    enable_local_indexer: bool
    enable_kv_routing: bool
    metrics_labels: list[tuple[str, str]]
    disaggregation_mode: DisaggregationMode
    health_check_payload: dict[str, Any] | None
    structural_tag_mode: str
    structural_tag_scope: str
    structural_tag_schema: str
    route_to_encoder: bool
    media_decoder: Any
    media_fetcher: Any
    kv_state_endpoint: str | None
    default_thinking_mode: str | None
    structural_tag: dict[str, Any] | None
    response_plane: str
    enable_rl: bool
    allow_download: bool


class WorkerFields(_Overrides, total=False):
    """The fields of `WorkerConfig` but the two model names, as keywords of a function that makes one."""

    model_input: ModelInput


@dataclass
class WorkerConfig:
    """Everything a `Worker` needs to know beside its engine. Positions are API: new fields are keyword-only."""

    namespace: str
    """The deployment this worker belongs to."""
    component: str = DEFAULT_COMPONENT
    """Name shared by the replicas of this worker."""
    endpoint: str = DEFAULT_ENDPOINT
    """Name of the endpoint that serves `generate`."""
    model_name: str = ""
    """Model directory or name. It brings tokenizer and chat template. Empty: the card has a name only."""
    served_model_name: str | None = None
    """The name clients use. None: what `EngineConfig` names."""
    model_input: ModelInput = ModelInput.Tokens
    """What the engine receives: tokens, or for a `RawEngine` text or tensors."""
    endpoint_types: str = DEFAULT_ENDPOINT_TYPES
    """OpenAI surfaces to serve, a comma list."""
    discovery_backend: str = "etcd"
    """Where workers and frontends find each other: etcd, file, kubernetes, mem, or auto."""
    request_plane: str = "tcp"
    """How requests travel: tcp or nats."""
    event_plane: str | None = None
    """How KV events and load reports travel: zmq or nats. None: zmq."""
    use_kv_events: bool = False
    """Deprecated and without effect."""
    custom_jinja_template: str | None = None
    """Path of a chat template that replaces the model's own; the frontend renders it."""
    tool_call_parser: str | None = None
    """Name of the parser that the frontend applies to tool calls."""
    reasoning_parser: str | None = None
    """Name of the parser that the frontend applies to reasoning."""
    exclude_tools_when_tool_choice_none: bool = True
    """Keep the tools out of the prompt when the client sends `tool_choice: none`."""
    enable_local_indexer: bool = True
    """Let routers recover lost KV events from this worker. Forced off for decode and encode workers."""
    enable_kv_routing: bool = True
    """False: no KV events and no load snapshots leave this worker."""
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)
    """Labels added to every metric of the endpoint."""
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    """Role of this worker."""
    health_check_payload: dict[str, Any] | None = None
    """The operator's canary request; wins over the engine's."""
    structural_tag_mode: str = "off"
    """Constrain tool calls with structural tags: off or on."""
    structural_tag_scope: str = "auto"
    """When the tag applies: auto or always."""
    structural_tag_schema: str = "auto"
    """How strictly arguments follow their schema: auto or strict."""
    route_to_encoder: bool = False
    """Send multimodal requests through an encode worker first. Only for the roles agg and prefill."""
    media_decoder: Any = None
    """A `MediaDecoder`: media that the frontend decodes for this worker."""
    media_fetcher: Any = None
    """A `MediaFetcher`: how the frontend fetches media for this worker."""
    kv_state_endpoint: str | None = None
    """Endpoint that owns the KV state. None: the serving endpoint."""
    default_thinking_mode: str | None = None
    """Whether a request thinks when it does not choose: enabled or disabled."""
    _: KW_ONLY
    structural_tag: dict[str, Any] | None = None
    """The newer form of the three `structural_tag_*` fields."""
    response_plane: str = "tcp"
    """How answers travel on the native wire: tcp or quic."""
    enable_rl: bool = False
    """Serve the reinforcement-learning discovery endpoint."""
    allow_download: bool = False
    """Look a model name that is not a directory up on the hub; without it only `hub:NAME` is."""

    def __post_init__(self) -> None:
        self.disaggregation_mode = coerce_disaggregation_mode(self.disaggregation_mode)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        check_structural_tag(self.structural_tag)

    @property
    def local_indexer_enabled(self) -> bool:
        """Return whether this worker answers KV-recovery queries; decode and encode workers own no KV state."""
        return self.enable_local_indexer and self.disaggregation_mode in (
            DisaggregationMode.AGGREGATED,
            DisaggregationMode.PREFILL,
        )

    @classmethod
    def from_runtime_config(
        cls,
        runtime_cfg: Any,
        model_name: str,
        served_model_name: str | None = None,
        model_input: ModelInput | None = None,
        **overrides: Unpack[_Overrides],
    ) -> Self:
        """Read the attributes of a parsed command line (ours or another system's). `overrides` win over all of them.

        `namespace`, `discovery_backend`, `request_plane` and `event_plane` must exist (AttributeError otherwise);
        everything else falls back to the field's default.
        """
        values: dict[str, Any] = {
            "model_name": model_name,
            "served_model_name": served_model_name,
            **{name: getattr(runtime_cfg, name) for name in _REQUIRED_ATTRIBUTES},
            **_optional_values(runtime_cfg),
        }
        if model_input is not None:
            values["model_input"] = model_input
        if "disaggregation_mode" not in overrides:
            values["disaggregation_mode"] = _role_of(runtime_cfg)
        if "health_check_payload" not in overrides:
            values["health_check_payload"] = _canary_of(runtime_cfg)
        return cls(**{**values, **overrides})


_REQUIRED_ATTRIBUTES: Final = ("namespace", "discovery_backend", "request_plane", "event_plane")

# attribute of the parsed command line -> field; an absent or None attribute leaves the field's default
_OPTIONAL_ATTRIBUTES: Final = {
    "endpoint_types": "endpoint_types",
    "use_kv_events": "use_kv_events",
    "custom_jinja_template": "custom_jinja_template",
    "dyn_tool_call_parser": "tool_call_parser",
    "dyn_reasoning_parser": "reasoning_parser",
    "dyn_default_thinking_mode": "default_thinking_mode",
    "exclude_tools_when_tool_choice_none": "exclude_tools_when_tool_choice_none",
    "enable_local_indexer": "enable_local_indexer",
    "enable_kv_routing": "enable_kv_routing",
    "dyn_structural_tag_scope": "structural_tag_scope",
    "dyn_structural_tag_schema": "structural_tag_schema",
    "structural_tag": "structural_tag",
    "route_to_encoder": "route_to_encoder",
    "kv_state_endpoint": "kv_state_endpoint",
    "response_plane": "response_plane",
    "enable_rl": "enable_rl",
    "allow_download": "allow_download",
}


def _optional_values(runtime_cfg: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "component": getattr(runtime_cfg, "component", None) or DEFAULT_COMPONENT,
        "endpoint": getattr(runtime_cfg, "endpoint", None) or DEFAULT_ENDPOINT,
        "structural_tag_mode": "on" if getattr(runtime_cfg, "dyn_enable_structural_tag", False) else "off",
    }
    for attribute, name in _OPTIONAL_ATTRIBUTES.items():
        value = getattr(runtime_cfg, attribute, None)
        if value is not None:
            values[name] = value
    return values


def _role_of(runtime_cfg: Any) -> DisaggregationMode:
    mode = getattr(runtime_cfg, "disaggregation_mode", None)
    return coerce_disaggregation_mode(mode if mode is not None else getattr(runtime_cfg, "serving_mode", None))


def _canary_of(runtime_cfg: Any) -> dict[str, Any] | None:
    return parse_health_check_payload_cli(getattr(runtime_cfg, "health_check_payload", None))


_RUNTIME_VARIABLES: Final = {
    "discovery_backend": "DYN_DISCOVERY_BACKEND",
    "request_plane": "DYN_REQUEST_PLANE",
    "event_plane": "DYN_EVENT_PLANE",
    "response_plane": "DYN_RESPONSE_PLANE",
}


@dataclass(frozen=True)
class RuntimeConfig:
    """Overrides of the runtime's environment; a field left None leaves its variable alone."""

    discovery_backend: str | None = None
    """Where workers and frontends find each other."""
    request_plane: str | None = None
    """How requests travel."""
    event_plane: str | None = None
    """How KV events and load reports travel."""
    _: KW_ONLY
    response_plane: str | None = None
    """How answers travel on the native wire: tcp or quic."""

    def __post_init__(self) -> None:
        if self.response_plane is not None and self.response_plane not in RESPONSE_PLANES:
            raise ValueError(f"response_plane must be one of {', '.join(RESPONSE_PLANES)}, got {self.response_plane!r}")

    def export(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Write the fields that are set into the environment; call it before a runtime is created."""
        target = os.environ if environ is None else environ
        for name, variable in _RUNTIME_VARIABLES.items():
            value = getattr(self, name)
            if value is not None:
                target[variable] = value
