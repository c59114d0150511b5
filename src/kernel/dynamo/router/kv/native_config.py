"""The native configuration of KV routing: its members, defaults and ranges, and what a router here makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from dynamo.kv.approximate_index import DEFAULT_TTL_SECONDS
from dynamo.placement.policies.kv_default import DefaultCostParameters
from dynamo.router.kv.settings import KvRouterSettings

_COST: Final = DefaultCostParameters()


class NativeKvConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every member of the native configuration."""

    overlap_score_credit: float = _COST.overlap_score_credit
    overlap_score_credit_decay: float = _COST.overlap_score_credit_decay
    prefill_load_scale: float = _COST.prefill_load_scale
    decode_active_request_weight: float = _COST.decode_active_request_weight
    overlap_score_weight: float | None = None
    host_cache_hit_weight: float = _COST.host_cache_hit_weight
    disk_cache_hit_weight: float = _COST.disk_cache_hit_weight
    router_temperature: float = _COST.router_temperature
    use_kv_events: bool = True
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None
    router_prefill_load_model: str = "none"
    router_ttl_secs: float = DEFAULT_TTL_SECONDS
    router_approximate_cache_policy: str = "ttl"
    router_queue_threshold: float | None = None
    router_policy_config: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_event_threads: int = 4
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    enable_session_prefix_index: bool = False
    shared_cache_multiplier: float | None = None
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: str = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None


_NOT_NEGATIVE: Final = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
    "overlap_score_weight",
    "router_temperature",
    "router_ttl_secs",
    "router_queue_threshold",
    "router_predicted_ttl_secs",
    "conditional_disagg_eff_isl_threshold",
    "conditional_disagg_prefill_busy_threshold",
    "conditional_disagg_decode_busy_threshold",
)
_PARTS: Final = (
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "shared_cache_multiplier",
    "conditional_disagg_eff_isl_ratio_threshold",
)
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "router_approximate_cache_policy": ("ttl", "lru"),
    "router_queue_policy": ("fcfs", "lcfs", "wspt"),
    "router_prefill_load_model": ("none", "ais"),
    "router_tracking_hash": ("public-xxh3-v1", "keyed-xxh3-v1"),
    "shared_cache_type": ("none", "hicache"),
    "conditional_disagg_policy": ("isl_bounding", "prefill_load", "isl_or_load"),
}
# Members of older configurations that have no effect any more, and what they may be.
FORMER_MEMBERS: Final = (
    "durable_kv_events",
    "router_snapshot_threshold",
    "router_reset_states",
    "skip_initial_worker_wait",
)
# What no router of this package does, and the value that does not request it.
_NOT_BUILT: Final[Mapping[str, object]] = {
    "router_prefill_policy": None,
    "router_decode_policy": None,
    "router_prefill_load_model": "none",
    "router_tracking_hash": "public-xxh3-v1",
    "use_remote_indexer": False,
    "serve_indexer": False,
    "shared_cache_type": "none",
    "conditional_disagg_enabled": False,
}


def checked(values: NativeKvConfig) -> NativeKvConfig:
    """Return the values with `overlap_score_weight` spread over what it stands for. Raises ValueError naming a field."""
    for name in _NOT_NEGATIVE:
        value = getattr(values, name)
        if value is not None and not 0 <= value < math.inf:  # NaN is neither
            raise ValueError(f"{name} must be a finite, non-negative number, got {value}")
    for name in _PARTS:
        value = getattr(values, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}")
    for name, choices in _CHOICES.items():
        if getattr(values, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(values, name)!r}")
    if values.router_event_threads < 1:
        raise ValueError("router_event_threads must be at least 1")
    if values.router_approximate_cache_policy == "lru" and values.use_kv_events:
        raise ValueError("router_approximate_cache_policy=lru needs use_kv_events=False")
    if values.router_predicted_ttl_secs is not None and not values.use_kv_events:
        raise ValueError("router_predicted_ttl_secs needs use_kv_events=True")
    if values.enable_session_prefix_index and not values.use_kv_events:
        raise ValueError("enable_session_prefix_index needs use_kv_events=True")
    has_key = values.router_tracking_key_file is not None and values.router_tracking_key_id is not None
    has_part = values.router_tracking_key_file is not None or values.router_tracking_key_id is not None
    is_keyed = values.router_tracking_hash == "keyed-xxh3-v1"
    if is_keyed != has_part or has_part != has_key:
        raise ValueError("keyed-xxh3-v1 needs router_tracking_key_file and router_tracking_key_id; without it neither")
    weight = values.overlap_score_weight
    if weight is None:
        return values
    credit = 0.0 if weight == 0 else values.overlap_score_credit
    return msgspec.structs.replace(
        values, overlap_score_weight=None, prefill_load_scale=float(weight), overlap_score_credit=credit
    )


def not_built(values: NativeKvConfig) -> list[str]:
    """Return what the configuration requests and no router here does, as "member=value"."""
    asked = [f"{name}={getattr(values, name)!r}" for name, off in _NOT_BUILT.items() if getattr(values, name) != off]
    return [*asked, *(["router_queue_policy='lcfs'"] if values.router_queue_policy == "lcfs" else [])]


def settings_of_native(values: NativeKvConfig, over: KvRouterSettings) -> KvRouterSettings:
    """Return the settings of `over`, replaced by those that the configuration has; they are not settled."""
    given = msgspec.structs.asdict(values)
    names = KvRouterSettings.__dataclass_fields__.keys() & given.keys()
    ttls = {
        "router_predicted_ttl_secs": values.router_predicted_ttl_secs or None,
        "router_ttl_secs": max(values.router_ttl_secs, 0.1),  # 100 ms is the granularity
    }
    return replace(over, **{name: given[name] for name in names} | ttls)
