"""How one worker is deployed: names, planes, role. And the environment a runtime is created in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Self, TypedDict, Unpack

from dynamo.contract.endpoint_name import ENDPOINT_SCHEME, parse_endpoint
from dynamo.contract.health_check import PAYLOAD_VARIABLE, parse_health_check_payload_cli
from dynamo.contract.modes import DisaggregationMode, coerce_disaggregation_mode, parse_disaggregation_mode
from dynamo.protocol.model_types import ModelInput, parse_endpoint_types
from dynamo.protocol.parsers import REASONING_PARSERS, TOOL_PARSERS
from dynamo.protocol.structural_tag import TAG_SCHEMAS, TAG_SCOPES, check_structural_tag
from dynamo.runtime.base.settings import RESPONSE_PLANES, RuntimeSettings
from dynamo.settings.readers import FALSY, TRUTHY, SettingReader, file_path, one_of, read_boolean, switch, text, words
from dynamo.settings.table import declared, metadata_of, setting, settings_of

__all__ = [
    "DEFAULT_COMPONENT",
    "DEFAULT_ENDPOINT",
    "DEFAULT_ENDPOINT_TYPES",
    "RESPONSE_PLANES",
    "RuntimeConfig",
    "WorkerConfig",
    "WorkerFields",
    "adapter_of",
    "endpoint_of",
    "endpoint_types_of",
    "name_of",
    "read_structural_tag",
]

# Readers of what only a worker's settings have: names, endpoints, surfaces, structural tags.


def _read_name(given: str) -> str:
    """Read a name that can be a part of keys and subjects."""
    name = given.strip()
    if not name or any(character in "./\\" or character.isspace() for character in name):
        raise ValueError(f"{given!r} is not a name: it must not be empty or hold dots, slashes or blanks")
    return name


def _read_endpoint(given: str) -> str:
    """Read an endpoint name, or all three names with their scheme."""
    if not given.startswith(ENDPOINT_SCHEME):
        return _read_name(given)
    return ENDPOINT_SCHEME + ".".join(_read_name(part) for part in parse_endpoint(given))


def _read_endpoint_types(given: str) -> str:
    """Check a comma list of OpenAI surfaces; it stays text."""
    parse_endpoint_types(given)
    return given


def adapter_of(given: str) -> str:
    """Check the name and the source of an adapter, `NAME=PATH` or `NAME=URI`; it stays text. Raises ValueError."""
    name, _, source = given.partition("=")
    if not name or not source:
        raise ValueError(f"{given!r} is no adapter: write NAME=PATH or NAME=URI")
    if "://" in source and not source.startswith(("file:///", "hf://")):
        raise ValueError(f"{given!r}: an adapter comes from a path, file:/// or hf://ORGANISATION/NAME")
    return given


name_of: Final = SettingReader(_read_name)
endpoint_of: Final = SettingReader(_read_endpoint)
endpoint_types_of: Final = SettingReader(_read_endpoint_types)


def read_structural_tag(given: str) -> dict[str, Any] | None:
    """Read true, false or the JSON object of a policy."""
    if given.strip().lower() in TRUTHY | FALSY:
        return {} if read_boolean(given) else None
    try:
        value = json.loads(given)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{given!r} is neither true, false nor a JSON object")
    check_structural_tag(value)
    return value


DEFAULT_COMPONENT: Final = "backend"
DEFAULT_ENDPOINT: Final = "generate"
DEFAULT_ENDPOINT_TYPES: Final = "chat,completions"

_IDENTITY: Final = "worker identity"
_ROLE: Final = "role and routing"
_TEXT: Final = "templates and parsers"
_OPERATION: Final = "operation"

_mode: Final = SettingReader(parse_disaggregation_mode)
_tag: Final = SettingReader(read_structural_tag)

NAMESPACE_SUFFIX: Final = declared("DYN_NAMESPACE_WORKER_SUFFIX", text, "Appended to the namespace with a dash")
ENABLE_STRUCTURAL_TAG: Final = declared(
    "DYN_ENABLE_STRUCTURAL_TAG",
    switch,
    "Constrain tool calls with [structural tags](tools-and-reasoning.md#structural-tags)",
    unset=False,
    flag="--dyn-enable-structural-tag",
    group=_TEXT,
)
# Judged in `health_check`, which warns and goes without a canary: a bad probe must not stop a worker. Its variable is read
# there too, because it also applies to workers that never parse a command line.
HEALTH_CHECK_PAYLOAD: Final = declared(
    PAYLOAD_VARIABLE,
    text,
    "The canary's request: a JSON object or `@FILE`",
    flag="--health-check-payload",
    group=_OPERATION,
    is_read_later=True,
)

_adapters: Final[SettingReader[tuple[str, ...]]] = SettingReader(
    lambda given: tuple(map(adapter_of, words.parse(given))), show=",".join, metavar="NAME=URI"
)
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
    loras: tuple[str, ...]
    model_aliases: Sequence[str] | None
    runtime_settings: RuntimeSettings | None


class WorkerFields(_Overrides, total=False):
    """The fields of `WorkerConfig` but the two model names, as keywords of a function that makes one."""

    model_input: ModelInput


@dataclass
class WorkerConfig:
    """Everything a `Worker` needs to know beside its engine. Positions are API: new fields are keyword-only."""

    # fmt: off
    namespace: str = field(metadata=metadata_of(declared("DYN_NAMESPACE", name_of, unset="dynamo",
        meaning="Deployment this worker belongs to; `DYN_NAMESPACE_WORKER_SUFFIX`, when set, is appended with a dash",
        flag="--namespace", group=_IDENTITY)))
    """The deployment this worker belongs to."""
    component: str = setting(DEFAULT_COMPONENT, "DYN_COMPONENT", name_of,
        "Name shared by the replicas of this worker; an engine may choose another default",
        flag="--component", group=_IDENTITY)
    """Name shared by the replicas of this worker."""
    endpoint: str = setting(DEFAULT_ENDPOINT, "DYN_ENDPOINT", endpoint_of,
        "Name of the endpoint that serves `generate`, or `dyn://NAMESPACE.COMPONENT.ENDPOINT` for all three at once",
        flag="--endpoint", group=_IDENTITY)
    """Name of the endpoint that serves `generate`."""
    model_name: str = ""
    """Model directory or name. It brings tokenizer and chat template. Empty: the card has a name only."""
    served_model_name: str | None = None
    """The name clients use. None: what `EngineConfig` names."""
    model_input: ModelInput = ModelInput.Tokens
    """What the engine receives: tokens, or for a `RawEngine` text or tensors."""
    endpoint_types: str = setting(DEFAULT_ENDPOINT_TYPES, "DYN_ENDPOINT_TYPES", endpoint_types_of,
        "OpenAI surfaces to serve, a comma list of `chat`, `completions`, `embeddings`, `classify`, "
        "`pooling`, `rerank`, `score`, `tensor`, `images`, `videos`, `audios`; those from `embeddings` to `score` need an "
        "engine with `embed()` ([embeddings](embeddings.md))",
        flag=("--endpoint-types", "--dyn-endpoint-types"), group=_IDENTITY)
    """OpenAI surfaces to serve, a comma list."""
    discovery_backend: str = "etcd"
    """Where workers and frontends find each other: etcd, file, kubernetes, mem, or auto."""
    request_plane: str = "tcp"
    """How requests travel: tcp or nats."""
    event_plane: str | None = None
    """How KV events and load reports travel: zmq or nats. None: zmq."""
    use_kv_events: bool = False
    """Deprecated and without effect."""
    custom_jinja_template: str | None = setting(None, "DYN_CUSTOM_JINJA_TEMPLATE", file_path,
        "File with a chat template that replaces the model's own; the frontend renders it",
        flag="--custom-jinja-template", group=_TEXT)
    """Path of a chat template that replaces the model's own; the frontend renders it."""
    tool_call_parser: str | None = setting(None, "DYN_TOOL_CALL_PARSER", one_of(*TOOL_PARSERS),
        "Which [format](tools-and-reasoning.md#names) the model writes tool calls in, such as `hermes` or `mistral`; an "
        "unknown name is refused, with near ones",
        flag="--dyn-tool-call-parser", group=_TEXT)
    """Name of the parser that the frontend applies to tool calls."""
    reasoning_parser: str | None = setting(None, "DYN_REASONING_PARSER", one_of(*REASONING_PARSERS),
        "Which [format](tools-and-reasoning.md#names) the model reasons in, such as `qwen3` or `deepseek_r1`; an "
        "unknown name is refused, with near ones",
        flag="--dyn-reasoning-parser", group=_TEXT)
    """Name of the parser that the frontend applies to reasoning."""
    exclude_tools_when_tool_choice_none: bool = setting(True, "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", switch,
        "Keep the tools out of the prompt when the client sends `tool_choice: none`",
        flag="--exclude-tools-when-tool-choice-none", group=_TEXT)
    """Keep the tools out of the prompt when the client sends `tool_choice: none`."""
    enable_local_indexer: bool = setting(True, "DYN_LOCAL_INDEXER", switch,
        "Let routers recover lost KV events from this worker (never on decode and encode workers); see "
        "[events](events.md#recovery)",
        flag="--enable-local-indexer", group=_ROLE)
    """Let routers recover lost KV events from this worker. Forced off for decode and encode workers."""
    enable_kv_routing: bool = setting(True, "DYN_ENABLE_KV_ROUTING", switch,
        "Build the publishers of KV events and load snapshots",
        flag="--enable-kv-routing", negative="--disable-kv-routing", group=_ROLE)
    """False: no KV events and no load snapshots leave this worker."""
    metrics_labels: list[tuple[str, str]] = field(default_factory=list)
    """Labels added to every metric of the endpoint."""
    disaggregation_mode: DisaggregationMode = setting(DisaggregationMode.AGGREGATED, "DYN_DISAGGREGATION_MODE", _mode,
        "Role: `agg`, `prefill`, `decode`, `encode`. Clients are served by `agg`, and by `decode` together with `prefill`; "
        "see [disaggregation](disaggregation.md)",
        flag="--disaggregation-mode", group=_ROLE)
    """Role of this worker."""
    health_check_payload: dict[str, Any] | None = None
    """The operator's canary request; wins over the engine's."""
    structural_tag_mode: str = "off"
    """Constrain tool calls with structural tags: off or on."""
    structural_tag_scope: str = setting("auto", "DYN_STRUCTURAL_TAG_SCOPE", one_of(*TAG_SCOPES),
        "When the tag applies: `auto` (a call must come, or a tool is strict), `always`",
        flag="--dyn-structural-tag-scope", group=_TEXT)
    """When the tag applies: auto or always."""
    structural_tag_schema: str = setting("auto", "DYN_STRUCTURAL_TAG_SCHEMA", one_of(*TAG_SCHEMAS),
        "Which arguments follow their schema: `auto` (those of strict tools and forced choices), `strict` (all)",
        flag="--dyn-structural-tag-schema", group=_TEXT)
    """How strictly arguments follow their schema: auto or strict."""
    route_to_encoder: bool = setting(False, "DYN_ROUTE_TO_ENCODER", switch,
        "Have an encode worker encode the media of requests first (`agg` and `prefill` only); see "
        "[disaggregation](disaggregation.md#encode-workers)",
        flag="--route-to-encoder", group=_ROLE)
    """Send multimodal requests through an encode worker first. Only for the roles agg and prefill."""
    media_decoder: Any = None
    """A `MediaDecoder`: media that the frontend decodes for this worker."""
    media_fetcher: Any = None
    """A `MediaFetcher`: how the frontend fetches media for this worker."""
    kv_state_endpoint: str | None = setting(None, "DYN_KV_STATE_ENDPOINT", text,
        "Endpoint that owns the KV state, written on the card; unset: the serving endpoint",
        flag="--kv-state-endpoint", group=_ROLE)
    """Endpoint that owns the KV state. None: the serving endpoint."""
    default_thinking_mode: str | None = setting(None, "DYN_DEFAULT_THINKING_MODE", one_of("enabled", "disabled"),
        "`enabled` or `disabled`: what the chat template gets when a request does not say",
        flag="--dyn-default-thinking-mode", group=_TEXT)
    """Whether a request thinks when it does not choose: enabled or disabled."""
    _: KW_ONLY
    structural_tag: dict[str, Any] | None = setting(None, "DYN_STRUCTURAL_TAG", _tag,
        "`true`, `false` or a JSON object with `scope` (there `always` unless said otherwise) and `schema`; the newer "
        "form of `--dyn-enable-structural-tag` and the two flags of its name",
        flag="--dyn-structural-tag", dest="structural_tag", group=_TEXT)
    """The newer form of the three `structural_tag_*` fields."""
    response_plane: str = "tcp"
    """How answers travel on the native wire: tcp or quic."""
    enable_rl: bool = setting(False, "DYN_ENABLE_RL", switch,
        "Serve the reinforcement-learning directory endpoint (needs the status server)",
        flag="--enable-rl", group=_OPERATION)
    """Serve the reinforcement-learning discovery endpoint."""
    allow_download: bool = setting(False, "DYN_ALLOW_DOWNLOAD", switch,
        "Look a model name that is not a directory up on the hub; without it only `hub:NAME` is, and no other name "
        "leaves the machine",
        flag="--allow-download", group=_OPERATION)
    """Resolve a model name that is not a directory on the hub; without it only `hub:NAME` is."""
    loras: tuple[str, ...] = setting((), "DYN_LORAS", _adapters,
        "Adapter to load at start, `NAME=PATH` or `NAME=URI` with `file:///` or `hf://`; may be repeated, or separated by "
        "commas. For engines that [load adapters](adapters.md)",
        flag="--lora", dest="loras", group=_OPERATION, repeats=True)
    """Adapters to load at start, each `NAME=PATH` or `NAME=URI`."""
    model_aliases: Sequence[str] | None = None
    """Further names that clients may use. None: those that `EngineConfig` names."""
    runtime_settings: RuntimeSettings | None = field(default=None, compare=False, repr=False)
    """Settings of the runtime beside the planes above. None: those of the environment."""
    # fmt: on

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
    **{made.dest: name for name, made in settings_of(WorkerConfig) if name not in ("namespace", "disaggregation_mode")},
    "use_kv_events": "use_kv_events",
    "response_plane": "response_plane",
}


def _optional_values(runtime_cfg: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "structural_tag_mode": "on" if getattr(runtime_cfg, "dyn_enable_structural_tag", False) else "off",
    }
    for attribute, name in _OPTIONAL_ATTRIBUTES.items():
        value = getattr(runtime_cfg, attribute, None)
        if value is not None and (value or name not in ("component", "endpoint")):
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
