"""How one worker is deployed: names, planes, role. And the environment a runtime is created in."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Self

from dynamo.contract.health_check import parse_health_check_payload_cli
from dynamo.contract.modes import DisaggregationMode, coerce_disaggregation_mode
from dynamo.protocol.model_types import ModelInput

__all__ = [
    "DEFAULT_COMPONENT",
    "DEFAULT_ENDPOINT",
    "DEFAULT_ENDPOINT_TYPES",
    "RESPONSE_PLANES",
    "RuntimeConfig",
    "WorkerConfig",
]

DEFAULT_COMPONENT: Final = "backend"
DEFAULT_ENDPOINT: Final = "generate"
DEFAULT_ENDPOINT_TYPES: Final = "chat,completions"
RESPONSE_PLANES: Final = ("tcp", "quic")

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "structural_tag_mode": ("off", "on"),
    "structural_tag_scope": ("auto", "always"),
    "structural_tag_schema": ("auto", "strict"),
}


@dataclass
class WorkerConfig:
    """Everything a `Worker` needs to know beside its engine. Positions are API: new fields are keyword-only."""

    namespace: str
    component: str = DEFAULT_COMPONENT
    endpoint: str = DEFAULT_ENDPOINT
    model_name: str = ""  # HF id or local path; empty: a name-only card
    served_model_name: str | None = None
    model_input: ModelInput = ModelInput.Tokens
    endpoint_types: str = DEFAULT_ENDPOINT_TYPES  # comma list
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None  # None: zmq
    use_kv_events: bool = False  # deprecated and without effect
    custom_jinja_template: str | None = None  # path; the frontend renders it
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    enable_local_indexer: bool = True  # forced off for decode and encode
    enable_kv_routing: bool = True  # false: no KV events and no snapshots leave this worker
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    health_check_payload: dict[str, Any] | None = None  # the operator's canary; wins over the engine's
    structural_tag_mode: str = "off"
    structural_tag_scope: str = "auto"
    structural_tag_schema: str = "auto"
    route_to_encoder: bool = False  # multimodal requests go to an encode worker first; agg and prefill only
    media_decoder: Any = None
    media_fetcher: Any = None
    kv_state_endpoint: str | None = None  # None: the serving endpoint owns the KV state
    default_thinking_mode: str | None = None
    _: KW_ONLY
    structural_tag: dict[str, Any] | None = None
    response_plane: str = "tcp"
    enable_rl: bool = False

    def __post_init__(self) -> None:
        self.disaggregation_mode = coerce_disaggregation_mode(self.disaggregation_mode)
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        check_structural_tag(self.structural_tag)

    @property
    def local_indexer_enabled(self) -> bool:
        """Whether this worker answers KV-recovery queries: decode and encode workers hold nothing worth asking for."""
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
        **overrides: Any,
    ) -> Self:
        """Read the attributes of a parsed command line (ours or another system's). `overrides` win over all of it.

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


_TAG_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "scope": _CHOICES["structural_tag_scope"],
    "schema": _CHOICES["structural_tag_schema"],
    # Native ones that nothing of ours reads; their values are the native frontend's affair.
    "allow_tool_calls_with_structured_output": (),
    "exclude_special_tokens": (),
    "reasoning_boundary": (),
    "tool_arguments_any_order": (),
}


def check_structural_tag(tag: Mapping[str, Any] | None) -> None:
    """Raises ValueError naming the member that is unknown or wrong."""
    for name, value in (tag or {}).items():
        if name not in _TAG_MEMBERS:
            raise ValueError(f"structural_tag has no member {name!r}; it has {', '.join(_TAG_MEMBERS)}")
        if _TAG_MEMBERS[name] and value not in _TAG_MEMBERS[name]:
            raise ValueError(f"structural_tag.{name} must be one of {', '.join(_TAG_MEMBERS[name])}, got {value!r}")


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
    request_plane: str | None = None
    event_plane: str | None = None
    _: KW_ONLY
    response_plane: str | None = None

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
