"""The configuration of a mock engine as one JSON object: what `--extra-engine-args` reads and what the flags become.

    {"engine": {"backend": "vllm", "num_gpu_blocks": 4096, ...}, "dp_size": 1, "dynamo": {...}}

A mistake is an InvalidArgument that names the path; an unknown member also lists the known ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.mocker.output import ReasoningShape
from dynamo.mocker.timing import FixedTiming, PolynomialTiming, read_profile
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.base.addresses import LOOPBACK
from dynamo.scheduling import HostTierOptions, PassTiming, SchedulerOptions, SglangOptions

DEFAULT_BLOCK_SIZES: Final[Mapping[str, int]] = {"vllm": 64, "sglang": 1, "trtllm": 32}
DEFAULT_ACCEPT_RATES: Final = (0.85, 0.3, 0.0, 0.0, 0.0)
MAX_RANKS: Final = 1024

_SCHEDULER: Final = frozenset(
    {
        "num_gpu_blocks",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "speedup_ratio",
        "decode_speedup_ratio",
        "preemption_mode",
    }
)
_ENGINE: Final = _SCHEDULER | {
    "backend",
    "block_size",
    "prefill_schedule_interval",
    "prefill_decode_interval",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "aic_mtp_seed",
    "worker_type",
    "emit_kv_events",
    "emit_kv_token_ids",
    "kv_transfer_bytes_per_token",
    "kv_bytes_per_token",
    "kv_transfer_bandwidth",
    "kv_transfer_timing_mode",
    "timing_model",
    "sglang",
    "trtllm",
    "kv_cache_bytes_per_token",
    "kv_cache_groups",
    "kv_cache_capacity_bytes",
    "native_host_offload",
}
_TOP: Final = frozenset(
    {"engine", "dp_size", "tensor_parallel_size", "startup_time", "gpu_memory_utilization", "dynamo"}
)
_DYNAMO: Final = frozenset(
    {
        "enable_local_indexer",
        "bootstrap_port",
        "handoff_session_timeout_ms",
        "reasoning",
        "response_replay_trace_path",
        "zmq_kv_events_port",
        "zmq_replay_port",
        "router_queue_policy",
    }
)
_SGLANG: Final = frozenset(
    {
        "schedule_policy",
        "max_prefill_tokens",
        "chunked_prefill_size",
        "clip_max_new_tokens",
        "schedule_conservativeness",
    }
)
_OFFLOAD: Final = frozenset({"num_host_blocks", "d2h_bandwidth_gbps", "h2d_bandwidth_gbps", "scope"})
HOST_BANDWIDTH_GBPS: Final = 32.0
# Members of the native object whose meaning is not built here: null, or the value that changes nothing, is fine.
_NOT_BUILT: Final[Mapping[str, object]] = {
    "engine.prefill_schedule_interval": 1,
    "engine.prefill_decode_interval": 0,
    "engine.kv_cache_groups": None,
    "engine.kv_cache_capacity_bytes": None,
    "engine.native_host_offload.scope": None,
    "gpu_memory_utilization": None,
    "dynamo.router_queue_policy": None,
}


@dataclass(frozen=True, slots=True)
class KvTransferTime:
    """How long the keys and values of a prompt are under way between workers."""

    bandwidth_gbps: float | None = None
    """10^9 bytes a second; None or 0: no time."""
    bytes_per_token: int | None = None

    def seconds(self, tokens: int) -> float:
        """Return the time for so many tokens."""
        if not self.bandwidth_gbps or not self.bytes_per_token:
            return 0.0
        return tokens * self.bytes_per_token / (self.bandwidth_gbps * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """One mock engine."""

    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    timing: PassTiming = field(default_factory=PolynomialTiming)
    dp_size: int = 1
    startup_seconds: float = 0.0
    transfer: KvTransferTime = field(default_factory=KvTransferTime)
    seed: int = 42
    """Of the drafts that are accepted, and of the token ids."""
    reasoning: ReasoningShape | None = None
    response_trace: Path | None = None
    enable_local_indexer: bool = True
    listen_host: str = LOOPBACK
    """Where the sockets of KV events and of bootstrap listen."""
    zmq_kv_events_port: int | None = None
    """Of rank 0; the others follow. None: KV events go straight to the event plane."""
    zmq_replay_port: int | None = None
    bootstrap_port: int | None = None
    """Where decode workers wait for the prompts of this prefill worker; None: prompts are handed over in the answer."""
    handoff_session_seconds: float = 300.0
    """How long a computed prompt waits for a decode worker."""

    @property
    def has_kv_events(self) -> bool:
        """Whether the engine publishes its blocks: a decode worker does not."""
        return self.scheduler.enable_prefix_caching and self.scheduler.role != "decode"


class _Section:
    """One object of the configuration, whose members are taken by name and type."""

    def __init__(self, value: object, path: str, known: frozenset[str]) -> None:
        if not isinstance(value, dict):
            raise InvalidArgument(f"{path or 'the configuration'} must be an object, got {_shown(value)}")
        self._values: JsonObject = value
        self._path = path
        for name in value:
            if name not in known:
                raise InvalidArgument(f"{self.path(name)}: unknown field; known are {', '.join(sorted(known))}")
            if self.path(name) in _NOT_BUILT and value[name] not in (None, _NOT_BUILT[self.path(name)]):
                raise InvalidArgument(f"{self.path(name)} is not built in this version")

    def path(self, name: str) -> str:
        """Return the path of a member."""
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Return whether a member is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """Return a member as it is; the default where it is absent or null."""
        return self._values[name] if self.has(name) else default

    def integer(self, name: str, default: int | None, *, minimum: int = 0, maximum: int | None = None) -> int | None:
        """Return a whole number."""
        if not self.has(name):
            return default
        value = self._values[name]
        if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise InvalidArgument(f"{self.path(name)} must be an integer {bounds}, got {_shown(value)}")
        return value

    def number(self, name: str, default: float | None) -> float | None:
        """Return a finite number of at least 0."""
        if not self.has(name):
            return default
        value = self._values[name]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise InvalidArgument(f"{self.path(name)} must be a finite number of at least 0, got {_shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw(name, default)
        if type(value) is not bool:
            raise InvalidArgument(f"{self.path(name)} must be true or false, got {_shown(value)}")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text."""
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise InvalidArgument(f"{self.path(name)} must be a string, got {_shown(value)}")
        return value

    def given(self, names: frozenset[str]) -> JsonObject:
        """Return those of the members that are there."""
        return {name: self._values[name] for name in names if self.has(name)}


def read_configuration(document: object) -> MockOptions:
    """Check a configuration and return its values. Reads the files that it names. Raises InvalidArgument."""
    top = _Section(document, "", _TOP)
    engine = _Section(top.raw("engine", {}), "engine", _ENGINE)
    dynamo = _Section(top.raw("dynamo", {}), "dynamo", _DYNAMO)
    backend = engine.text("backend", "vllm")
    if engine.boolean("emit_kv_token_ids", False) and backend == "sglang":
        raise InvalidArgument("engine.emit_kv_token_ids cannot be true for backend sglang")
    top.integer("tensor_parallel_size", 1, minimum=1)
    if engine.text("kv_transfer_timing_mode", "full_prompt") not in ("full_prompt", "destination_missing"):
        raise InvalidArgument("engine.kv_transfer_timing_mode must be full_prompt or destination_missing")
    replay, events = dynamo.integer("zmq_replay_port", None, minimum=1, maximum=65535), _events_port(dynamo)
    if replay is not None and events is None:
        raise InvalidArgument("dynamo.zmq_replay_port needs dynamo.zmq_kv_events_port")
    trace = dynamo.text("response_replay_trace_path", "")
    return MockOptions(
        scheduler=_scheduler(engine, backend),
        timing=_timing(engine.raw("timing_model", {"type": "polynomial"})),
        dp_size=top.integer("dp_size", 1, minimum=1, maximum=MAX_RANKS) or 1,
        startup_seconds=top.number("startup_time", 0.0) or 0.0,
        transfer=KvTransferTime(
            engine.number("kv_transfer_bandwidth", None),
            _transfer_bytes(engine),
        ),
        seed=engine.integer("aic_mtp_seed", 42) or 0,
        reasoning=_reasoning(dynamo.raw("reasoning")),
        response_trace=Path(trace) if trace else None,
        enable_local_indexer=dynamo.boolean("enable_local_indexer", True),
        zmq_kv_events_port=events,
        bootstrap_port=dynamo.integer("bootstrap_port", None, minimum=0, maximum=65535),
        handoff_session_seconds=(dynamo.number("handoff_session_timeout_ms", 300_000.0) or 0.0) / 1000,
        zmq_replay_port=replay,
    )


def read_configuration_file(path: Path) -> Any:
    """Read a file with a configuration. Raises InvalidArgument."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as JSON: {error}") from error


def _events_port(dynamo: _Section) -> int | None:
    return dynamo.integer("zmq_kv_events_port", None, minimum=1, maximum=65535)


def _scheduler(engine: _Section, backend: str) -> SchedulerOptions:
    sglang = _Section(engine.raw("sglang", {}), "engine.sglang", _SGLANG)
    trtllm = _Section(engine.raw("trtllm", {}), "engine.trtllm", frozenset({"capacity_scheduler_policy"}))
    policy = trtllm.text("capacity_scheduler_policy", "guaranteed_no_evict")
    if policy != "guaranteed_no_evict":
        raise InvalidArgument(f"engine.trtllm.capacity_scheduler_policy must be guaranteed_no_evict, got {policy!r}")
    drafts = engine.integer("aic_nextn", None, minimum=1, maximum=len(DEFAULT_ACCEPT_RATES))
    rates = engine.raw("aic_nextn_accept_rates", DEFAULT_ACCEPT_RATES)
    if not isinstance(rates, Sequence) or not all(type(rate) in (int, float) for rate in rates):
        raise InvalidArgument(f"engine.aic_nextn_accept_rates must be a list of numbers, got {_shown(rates)}")
    padded = (*rates, *[0.0] * len(DEFAULT_ACCEPT_RATES))
    try:
        return SchedulerOptions(
            backend=backend,
            role=engine.text("worker_type", "aggregated"),
            block_size=engine.integer("block_size", DEFAULT_BLOCK_SIZES.get(backend, 64), minimum=1) or 1,
            accept_rates=() if drafts is None else tuple(float(rate) for rate in padded[:drafts]),
            host=_host_tier(engine),
            sglang=SglangOptions(**sglang.given(_SGLANG)),
            **engine.given(_SCHEDULER),
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"engine.{error}") from error


def _host_tier(engine: _Section) -> HostTierOptions | None:
    if not engine.has("native_host_offload"):
        return None
    offload = _Section(engine.raw("native_host_offload"), "engine.native_host_offload", _OFFLOAD)
    blocks = offload.integer("num_host_blocks", None, minimum=1)
    if blocks is None:
        raise InvalidArgument("native_host_offload.num_host_blocks is missing")
    token_bytes = engine.integer("kv_cache_bytes_per_token", _transfer_bytes(engine))
    if not token_bytes:
        raise InvalidArgument("native_host_offload needs kv_cache_bytes_per_token or kv_transfer_bytes_per_token")
    block_bytes = token_bytes * (engine.integer("block_size", DEFAULT_BLOCK_SIZES["vllm"]) or 1)
    to_host, to_device = (
        offload.number(name, HOST_BANDWIDTH_GBPS) for name in ("d2h_bandwidth_gbps", "h2d_bandwidth_gbps")
    )
    if not to_host or not to_device:
        raise InvalidArgument("native_host_offload needs bandwidths above 0")
    return HostTierOptions(
        num_host_blocks=blocks,
        to_host_block_ms=block_bytes / (to_host * 1e6),
        to_device_block_ms=block_bytes / (to_device * 1e6),
    )


def _transfer_bytes(engine: _Section) -> int | None:
    return engine.integer("kv_transfer_bytes_per_token", engine.integer("kv_bytes_per_token", None))


def _timing(model: object) -> PassTiming:
    path = "engine.timing_model"
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "polynomial":
        _Section(model, path, frozenset({"type"}))
        return PolynomialTiming()
    if kind == "fixed":
        fixed = _Section(model, path, frozenset({"type", "prefill_ms", "decode_ms"}))
        for name in ("prefill_ms", "decode_ms"):
            if not fixed.has(name):
                raise InvalidArgument(f"{path}.{name} is missing")
        return FixedTiming(fixed.number("prefill_ms", 0.0) or 0.0, fixed.number("decode_ms", 0.0) or 0.0)
    if kind == "external":
        external = _Section(model, path, frozenset({"type", "provider", "config"}))
        provider = external.text("provider", "")
        if provider != "dynamo_profile":
            raise InvalidArgument(f"{path}.provider must be dynamo_profile, got {provider!r}; {AIS}")
        config = _Section(external.raw("config", {}), f"{path}.config", frozenset({"path"}))
        return read_profile(Path(config.text("path", "")))
    raise InvalidArgument(f"{path}.type must be polynomial, fixed or external, got {_shown(kind)}")


AIS: Final = "external timing needs the package aisimulate, which is not public"


def _reasoning(value: object) -> ReasoningShape | None:
    if value is None:
        return None
    names = ("start_thinking_token_id", "end_thinking_token_id", "thinking_ratio")
    shape = _Section(value, "reasoning", frozenset(names))
    for name in names:
        if not shape.has(name):
            raise InvalidArgument(f"reasoning.{name} is missing")
    return ReasoningShape(*(shape.raw(name) for name in names))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
