"""What request headers add to a request. Headers beat the body, because gateways set them and clients do not."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from msgspec import Struct, field

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import U64_MAX, AgentHints, NvExt

DEFAULT_METADATA_PREFIX: Final = "x-dynamo-meta-"
MAX_METADATA_ENTRIES: Final = 64
MAX_METADATA_BYTES: Final = 64 * 1024  # names and values together
U32_MAX: Final = 2**32 - 1  # as a dp rank: "not set"
_YES: Final = ("1", "true", "yes")

# What coding agents say of themselves, passed on with a session, as in 1.6.1: bounds included.
_AGENT_PREFIXES: Final = ("x-claude-code-", "x-codex-")
_AGENT_NAMES: Final = frozenset({"x-openai-subagent", "x-session-id", "x-parent-session-id", "thread-id"})
MAX_AGENT_HEADERS: Final = 64
MAX_AGENT_HEADER_BYTES: Final = 16 * 1024  # of one value; longer ones are left out
MAX_AGENT_BYTES: Final = 32 * 1024  # names and values together


class HeaderEffects(Struct):
    """The request options in headers, beyond the body's fields."""

    request_id: str | None = None  # `x-request-id`: echoed and logged, never the id of the work
    metadata: dict[str, str] = field(default_factory=dict)
    session_id: str | None = None
    parent_session_id: str | None = None
    session_final: bool = False
    agent_id: str | None = None  # of several agents in one session
    parent_agent_id: str | None = None
    agent_headers: dict[str, list[str]] = field(default_factory=dict)  # the values of each
    input_trigger: str | None = None  # what the last message is, once the request was read
    explains_routing: bool = False  # the answer explains why its worker was chosen
    warnings: list[str] = field(default_factory=list)  # for the log; the request goes on

    @property
    def policy_class(self) -> str | None:
        """The router queue the request names."""
        return self.metadata.get("policy-class")

    @property
    def agent_context(self) -> dict[str, object] | None:
        """The worker's `agent_context`; None without a session."""
        if self.session_id is None:
            return None
        context: dict[str, object] = {"session_id": self.session_id}
        if self.parent_session_id is not None:
            context["parent_session_id"] = self.parent_session_id
        if self.session_final:
            context["session_final"] = True
        if self.agent_id is not None:
            context["agent_id"] = self.agent_id
        if self.parent_agent_id is not None:
            context["parent_agent_id"] = self.parent_agent_id
        if self.input_trigger is not None:
            context["input_trigger"] = self.input_trigger
        return context


class Extensible(Protocol):
    """What headers may write to."""

    nvext: NvExt | None


def apply_headers(
    request: Extensible,
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    metadata_prefix: str = DEFAULT_METADATA_PREFIX,
    nvext_enabled: bool = True,
) -> HeaderEffects:
    """Write the overriding headers into `request` and return the rest. Header names are lower case.

    Give pairs rather than a mapping where a header may occur twice: the first metadata entry of a name wins. With
    `nvext_enabled` False the body's `nvext` and the routing headers are dropped, with a warning.

    Raises:
        RequestRejected: 400 for a routing header that is no number in range, 431 for too much metadata.
    """
    effects = HeaderEffects()
    if not nvext_enabled and request.nvext is not None:
        request.nvext = None
        effects.warnings.append("nvext is disabled on this frontend: the request's nvext was ignored")
    chosen: dict[str, tuple[int, str]] = {}  # what is set -> (preference, value); the lowest preference wins
    metadata_bytes = agent_bytes = 0
    # A list is what a frontend gives: there is no check whether it is a mapping, which is a search through bases.
    for name, value in headers if headers.__class__ is list or not isinstance(headers, Mapping) else headers.items():
        if name.startswith(metadata_prefix):
            key = name[len(metadata_prefix) :]
            if not key or key in effects.metadata or _is_credential(key, value):
                continue
            metadata_bytes += len(key) + len(value)
            if len(effects.metadata) >= MAX_METADATA_ENTRIES or metadata_bytes > MAX_METADATA_BYTES:
                raise RequestRejected(
                    431,
                    f"Request metadata headers exceed the limit of {MAX_METADATA_ENTRIES} entries or "
                    f"{MAX_METADATA_BYTES} bytes",
                )
            effects.metadata[key] = value
            continue
        if name.startswith(_AGENT_PREFIXES) or name in _AGENT_NAMES:
            agent_bytes += len(name) + len(value)
            fits = len(value) <= MAX_AGENT_HEADER_BYTES and agent_bytes <= MAX_AGENT_BYTES
            is_counted = name in effects.agent_headers or len(effects.agent_headers) < MAX_AGENT_HEADERS
            if fits and is_counted and not _is_credential(name, value):
                effects.agent_headers.setdefault(name, []).append(value)
        known = _KNOWN.get(name)
        if known is None:
            continue
        what, preference = known
        if what in _ROUTING and not nvext_enabled:
            effects.warnings.append(f"nvext is disabled on this frontend: header {name} was ignored")
            continue
        if what not in chosen or preference < chosen[what][0]:
            chosen[what] = (preference, value)
    for what, (_, value) in chosen.items():
        routed = _ROUTING.get(what)
        if routed is not None:
            if request.nvext is None:
                request.nvext = NvExt()
            routed(request.nvext, value)
        else:
            _describe(effects, what, value)
    return effects


def _is_credential(key: str, value: str) -> bool:
    """Metadata travels to workers and logs: a token must not."""
    return "authorization" in key or value[:7].lower() == "bearer "


def _describe(effects: HeaderEffects, what: str, value: str) -> None:
    match what:
        case "request_id":
            effects.request_id = value
        case "session_id":
            effects.session_id = value.strip() or None
        case "parent_session_id":
            effects.parent_session_id = value.strip() or None
        case "agent_id":
            effects.agent_id = value.strip() or None
        case "parent_agent_id":
            effects.parent_agent_id = value.strip() or None
        case "session_final":
            effects.session_final = value.strip().lower() in _YES
        case "explain_routing":
            effects.explains_routing = value.strip().lower() in _YES
        case _:  # x-dynamo-request-id
            try:
                uuid.UUID(value)
            except ValueError:
                effects.warnings.append(f"header x-dynamo-request-id is not a UUID and was ignored: {value[:64]!r}")
            else:
                effects.request_id = effects.request_id or value


def _integer(header: str, value: str, low: int, high: int) -> int:
    text = value.strip()
    if text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 21 and low <= int(text) <= high:
        return int(text)
    raise RequestRejected(
        400, f"Header {header} must be an integer between {low} and {high}, got '{value[:64]}'", param=header
    )


def _worker(nvext: NvExt, value: str) -> None:
    nvext.backend_instance_id = nvext.decode_worker_id = _integer("x-dynamo-worker-instance-id", value, 0, U64_MAX)


def _prefill_worker(nvext: NvExt, value: str) -> None:
    nvext.prefill_worker_id = _integer("x-dynamo-prefill-instance-id", value, 0, U64_MAX)


def _dp_rank(nvext: NvExt, value: str) -> None:
    rank = _integer("x-dynamo-dp-rank", value, 0, U32_MAX)
    nvext.dp_rank = None if rank == U32_MAX else rank


def _prefill_dp_rank(nvext: NvExt, value: str) -> None:
    rank = _integer("x-dynamo-prefill-dp-rank", value, 0, U32_MAX)
    nvext.prefill_dp_rank = None if rank == U32_MAX else rank


def _priority(nvext: NvExt, value: str) -> None:
    nvext.agent_hints = nvext.agent_hints or AgentHints()
    nvext.agent_hints.priority = _integer("x-dynamo-request-priority", value, -(2**31), 2**31 - 1)


def _strict_priority(nvext: NvExt, value: str) -> None:
    nvext.agent_hints = nvext.agent_hints or AgentHints()
    nvext.agent_hints.strict_priority = _integer("x-dynamo-request-strict-priority", value, 0, U32_MAX)


def _slo_ttft(nvext: NvExt, value: str) -> None:
    nvext.slo_ttft_ms = _integer("x-dynamo-slo-ttft-ms", value, 1, U32_MAX)


def _tenant(nvext: NvExt, value: str) -> None:
    if value:  # empty is absent: the body's salt stays
        nvext.cache_salt = value


_ROUTING: Final[dict[str, Callable[[NvExt, str], None]]] = {
    "worker": _worker,
    "prefill_worker": _prefill_worker,
    "dp_rank": _dp_rank,
    "prefill_dp_rank": _prefill_dp_rank,
    "priority": _priority,
    "strict_priority": _strict_priority,
    "slo_ttft": _slo_ttft,
    "tenant": _tenant,
}

# header -> (what it sets, preference among its aliases: 0 is the canonical name)
_KNOWN: Final[dict[str, tuple[str, int]]] = {
    "x-request-id": ("request_id", 0),
    "x-dynamo-request-id": ("deprecated_request_id", 0),
    "x-dynamo-worker-instance-id": ("worker", 0),
    "x-worker-instance-id": ("worker", 1),
    "x-dynamo-prefill-instance-id": ("prefill_worker", 0),
    "x-prefill-instance-id": ("prefill_worker", 1),
    "x-dynamo-dp-rank": ("dp_rank", 0),
    "x-dp-rank": ("dp_rank", 1),
    "x-data-parallel-rank": ("dp_rank", 2),
    "x-dynamo-prefill-dp-rank": ("prefill_dp_rank", 0),
    "x-prefill-dp-rank": ("prefill_dp_rank", 1),
    "x-dynamo-request-priority": ("priority", 0),
    "x-dynamo-request-strict-priority": ("strict_priority", 0),
    "x-dynamo-slo-ttft-ms": ("slo_ttft", 0),
    "x-tenant-id": ("tenant", 0),
    "x-dynamo-session-id": ("session_id", 0),
    "x-claude-code-session-id": ("session_id", 1),
    "thread-id": ("session_id", 2),
    "x-session-id": ("session_id", 3),
    "x-dynamo-parent-session-id": ("parent_session_id", 0),
    "x-codex-parent-thread-id": ("parent_session_id", 1),
    "x-parent-session-id": ("parent_session_id", 2),
    "x-dynamo-session-final": ("session_final", 0),
    "x-dynamo-explain-routing": ("explain_routing", 0),
    "x-claude-code-agent-id": ("agent_id", 0),
    "x-claude-code-parent-agent-id": ("parent_agent_id", 0),
}

KNOWN_HEADERS: Final = frozenset(name.encode() for name in (*_KNOWN, *_AGENT_NAMES))
"""The headers that `apply_headers` reads, beside those of metadata and of agents."""

AGENT_HEADERS: Final = tuple(prefix.encode() for prefix in _AGENT_PREFIXES)
"""How further headers of agents begin."""

SERVING_HEADERS: Final = frozenset(_KNOWN) - {"x-tenant-id"}
"""The headers that decide how a request is served, and may be shown and kept: all that are known here but the tenant's, whose
value is a salt of caches."""
