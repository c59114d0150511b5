"""What the native `KvRouter` and its callers configure: the native names, defaults and ranges.

A configuration may name what this system has not built: it is a value, and may be stored, copied and passed on. Making a
`KvRouter` with it is refused, by name (`KvRouterConfig.settings`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from dynamo.placement import RouterMode
from dynamo.router.kv.native_config import FORMER_MEMBERS, NativeKvConfig, checked, not_built, settings_of_native
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.busy_workers import BusyThresholds

__all__ = ["KvRouterConfig", "LoadThresholdConfig", "RouterConfig", "TaintConstraints", "check_affinity"]

MAX_AFFINITY_SECONDS: Final = 31_536_000  # a year


_DEFAULTS: Final = NativeKvConfig()
_FIELDS: Final = frozenset(NativeKvConfig.__struct_fields__)
# Members that a model card always has, in the native order, and those that it has where they are set.
_IN_CARDS: Final = (
    *("overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "host_cache_hit_weight"),
    *(
        "disk_cache_hit_weight",
        "router_temperature",
        "use_kv_events",
        "router_replica_sync",
        "router_track_active_blocks",
    ),
    *(
        "router_track_output_blocks",
        "router_assume_kv_reuse",
        "router_track_prefill_tokens",
        "router_prefill_load_model",
    ),
    *(
        "router_ttl_secs",
        "router_queue_threshold",
        "router_policy_config",
        "router_event_threads",
        "router_queue_policy",
    ),
    *("use_remote_indexer", "serve_indexer", "shared_cache_type", "router_predicted_ttl_secs"),
)
_IN_CARDS_IF_SET: Final = (
    *("decode_active_request_weight", "shared_cache_multiplier", "enable_session_prefix_index", "router_tracking_hash"),
    *("router_tracking_key_file", "router_tracking_key_id", "conditional_disagg_enabled", "conditional_disagg_policy"),
    *("conditional_disagg_eff_isl_threshold", "conditional_disagg_eff_isl_ratio_threshold"),
    *("conditional_disagg_prefill_busy_threshold", "conditional_disagg_decode_busy_threshold"),
)
_MODES: Final[Mapping[RouterMode, str]] = {
    RouterMode.KV: "k_v",
    RouterMode.POWER_OF_TWO: "power_of_two_choices",
}


def _read(given: Mapping[str, object]) -> NativeKvConfig:
    """Return the values of keyword arguments. Raises TypeError and ValueError that name the argument."""
    try:
        values = msgspec.convert(given, NativeKvConfig)
    except msgspec.ValidationError as error:
        raise TypeError(str(error)) from error
    return checked(values)


class KvRouterConfig:
    """The configuration of a `KvRouter`. Its five weights can be read and set; the others are given when it is made."""

    __slots__ = ("_values",)

    def __init__(
        self,
        overlap_score_weight: float | None = None,
        host_cache_hit_weight: float = _DEFAULTS.host_cache_hit_weight,
        disk_cache_hit_weight: float = _DEFAULTS.disk_cache_hit_weight,
        router_temperature: float = _DEFAULTS.router_temperature,
        use_kv_events: bool = True,
        *,
        router_replica_sync: bool = False,
        router_track_active_blocks: bool = True,
        router_track_output_blocks: bool = False,
        router_assume_kv_reuse: bool = True,
        router_track_prefill_tokens: bool = True,
        router_prefill_load_model: str = "none",
        router_ttl_secs: float = _DEFAULTS.router_ttl_secs,
        router_approximate_cache_policy: Literal["ttl", "lru"] = "ttl",
        router_queue_threshold: float | None = None,
        router_event_threads: int = 4,
        router_queue_policy: str = "fcfs",
        use_remote_indexer: bool = False,
        serve_indexer: bool = False,
        enable_session_prefix_index: bool = False,
        shared_cache_multiplier: float | None = None,
        shared_cache_type: str = "none",
        router_predicted_ttl_secs: float | None = None,
        conditional_disagg_enabled: bool = False,
        conditional_disagg_policy: str = "isl_bounding",
        conditional_disagg_eff_isl_threshold: int = 2048,
        conditional_disagg_eff_isl_ratio_threshold: float = 0.7,
        conditional_disagg_prefill_busy_threshold: float | None = None,
        conditional_disagg_decode_busy_threshold: float | None = None,
        overlap_score_credit: float = _DEFAULTS.overlap_score_credit,
        overlap_score_credit_decay: float = _DEFAULTS.overlap_score_credit_decay,
        prefill_load_scale: float = _DEFAULTS.prefill_load_scale,
        decode_active_request_weight: float = _DEFAULTS.decode_active_request_weight,
        router_policy_config: str | None = None,
        router_prefill_policy: str | None = None,
        router_decode_policy: str | None = None,
        router_tracking_hash: Literal["public-xxh3-v1", "keyed-xxh3-v1"] = "public-xxh3-v1",
        router_tracking_key_file: str | os.PathLike[str] | None = None,
        router_tracking_key_id: str | None = None,
    ) -> None:
        """`overlap_score_weight` is the deprecated name of `prefill_load_scale`; 0 also sets the credit to 0.

        Raises TypeError for a value of another type, ValueError for one out of range; both name the argument.
        """
        if isinstance(router_tracking_key_file, os.PathLike):
            router_tracking_key_file = os.fspath(router_tracking_key_file)
        self._values = _read({name: value for name, value in locals().items() if name in _FIELDS})

    @staticmethod
    def from_json(config_json: str) -> KvRouterConfig:
        """Read a configuration from a JSON object. Raises ValueError naming the member that is unknown or wrong."""
        try:
            given = msgspec.json.decode(config_json, type=dict[str, Any])
            if given.get("durable_kv_events"):
                raise ValueError("durable_kv_events=true is not supported any more")
            known = {name: value for name, value in given.items() if name not in FORMER_MEMBERS}
            return KvRouterConfig._of(checked(msgspec.convert(known, NativeKvConfig)))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"Failed to parse KvRouterConfig JSON: {error}") from error

    @classmethod
    def _of(cls, values: NativeKvConfig) -> KvRouterConfig:
        made = cls.__new__(cls)
        made._values = values
        return made

    def copy(self) -> KvRouterConfig:
        return self._of(self._values)

    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
        decode_active_request_weight: float | None = None,
    ) -> KvRouterConfig:
        """Return a copy with those weights changed that are given."""
        given = {name: value for name, value in locals().items() if name in _FIELDS and value is not None}
        return self._of(_read({**msgspec.structs.asdict(self._values), **given}))

    def settings(self) -> KvRouterSettings:
        """Return what a router of this package goes by, over its policy file where there is one.

        Raises NotImplementedError naming what is set and not built, ValueError for a policy file that is not valid.
        """
        missing = not_built(self._values)
        if missing:
            raise NotImplementedError(f"KvRouterConfig({', '.join(missing)}): not built in dynamo-unified's KvRouter")
        return settings_of_native(self._values, KvRouterSettings(policy="default")).settle({})

    def as_record(self) -> dict[str, object]:
        """Return the configuration as model cards have it."""
        values, plain = self._values, _DEFAULTS
        found: dict[str, object] = {name: getattr(values, name) for name in _IN_CARDS}
        for name in _IN_CARDS_IF_SET:
            if getattr(values, name) != getattr(plain, name):
                found[name] = getattr(values, name)
        return {**found, "skip_initial_worker_wait": False}

    def _set(self, name: str, value: float) -> None:
        self._values = _read({**msgspec.structs.asdict(self._values), name: value})

    @property
    def overlap_score_credit(self) -> float:
        return self._values.overlap_score_credit

    @overlap_score_credit.setter
    def overlap_score_credit(self, value: float) -> None:
        self._set("overlap_score_credit", value)

    @property
    def overlap_score_credit_decay(self) -> float:
        return self._values.overlap_score_credit_decay

    @overlap_score_credit_decay.setter
    def overlap_score_credit_decay(self, value: float) -> None:
        self._set("overlap_score_credit_decay", value)

    @property
    def overlap_score_weight(self) -> float:
        return self._values.prefill_load_scale

    @overlap_score_weight.setter
    def overlap_score_weight(self, value: float) -> None:
        self._set("overlap_score_weight", value)

    @property
    def prefill_load_scale(self) -> float:
        return self._values.prefill_load_scale

    @prefill_load_scale.setter
    def prefill_load_scale(self, value: float) -> None:
        self._set("prefill_load_scale", value)

    @property
    def decode_active_request_weight(self) -> float:
        return self._values.decode_active_request_weight

    @decode_active_request_weight.setter
    def decode_active_request_weight(self, value: float) -> None:
        self._set("decode_active_request_weight", value)


class TaintConstraints:
    """Which taints a worker must have, and which ones count for it (a weight above 0) or against it (below 0)."""

    __slots__ = ("preferred_taints", "required_taints")

    def __init__(
        self, required_taints: set[str] | None = None, preferred_taints: dict[str, float] | None = None
    ) -> None:
        """Raises TypeError for anything but a set of texts and a dict of weights by text."""
        required: Any = set() if required_taints is None else required_taints
        preferred: Any = {} if preferred_taints is None else preferred_taints
        if not isinstance(required, set | frozenset) or not all(isinstance(each, str) for each in required):
            raise TypeError("required_taints must be a set of texts")
        if not isinstance(preferred, dict) or not all(isinstance(each, str) for each in preferred):
            raise TypeError("preferred_taints must be a dict of weights by text")
        self.required_taints: set[str] = set(required)
        self.preferred_taints: dict[str, float] = {name: float(weight) for name, weight in preferred.items()}

    def as_hint(self) -> dict[str, object]:
        """Return the `routing_constraints` of a worker's request."""
        return {"required_taints": sorted(self.required_taints), "preferred_taints": dict(self.preferred_taints)}


class LoadThresholdConfig:
    """From which load on a worker gets no new requests; None: that load does not count."""

    __slots__ = ("_thresholds",)

    def __init__(
        self,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> None:
        """Raises ValueError naming a threshold that is out of range."""
        self._thresholds = BusyThresholds(
            "",
            active_decode_blocks_threshold,
            active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac,
        )
        self._thresholds.check()

    @property
    def thresholds(self) -> BusyThresholds:
        """The thresholds as this package has them."""
        return self._thresholds

    @property
    def active_decode_blocks_threshold(self) -> float | None:
        return self._thresholds.active_decode_blocks_threshold

    @property
    def active_prefill_tokens_threshold(self) -> int | None:
        return self._thresholds.active_prefill_tokens_threshold

    @property
    def active_prefill_tokens_threshold_frac(self) -> float | None:
        return self._thresholds.active_prefill_tokens_threshold_frac


class RouterConfig:
    """How requests are routed: a mode, what the kv mode goes by, thresholds and the affinity of sessions."""

    __slots__ = ("_affinity", "_config", "_mode", "_thresholds")

    def __init__(
        self,
        mode: RouterMode,
        config: KvRouterConfig | None = None,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        enforce_disagg: bool = False,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
    ) -> None:
        """`enforce_disagg` has no effect, here and there. Raises TypeError and ValueError that name the argument."""
        if not isinstance(mode, RouterMode):
            raise TypeError(f"mode must be a RouterMode, got {type(mode).__name__}")
        self._mode, self._config = mode, config or KvRouterConfig()
        self._thresholds = LoadThresholdConfig(
            active_decode_blocks_threshold=active_decode_blocks_threshold,
            active_prefill_tokens_threshold=active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=active_prefill_tokens_threshold_frac,
        )
        check_affinity(session_affinity_ttl_secs, session_affinity_mode)
        self._affinity = (session_affinity_ttl_secs, session_affinity_mode)

    def as_record(self) -> dict[str, object]:
        """Return the configuration as a model card has it (`register_model(router_config=...)`)."""
        limits = msgspec.structs.asdict(self._thresholds.thresholds)
        ttl_seconds, mode = self._affinity
        return {
            "router_mode": _MODES.get(self._mode, self._mode.value.replace("-", "_")),
            "kv_router_config": self._config.as_record(),
            "load_threshold_config": {
                name: value for name, value in limits.items() if name != "model" and value is not None
            },
            "enforce_disagg": False,
            "session_affinity_ttl_secs": ttl_seconds,
            "session_affinity_mode": mode,
        }

    @property
    def router_mode(self) -> RouterMode:
        return self._mode

    @property
    def kv_router_config(self) -> KvRouterConfig:
        return self._config


def check_affinity(ttl_seconds: int | None, mode: str) -> None:
    """Check the two arguments of session affinity. Raises ValueError."""
    if mode not in ("hard", "soft"):
        raise ValueError(f"session_affinity_mode must be 'hard' or 'soft', got {mode!r}")
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_AFFINITY_SECONDS:
        raise ValueError(f"session_affinity_ttl_secs must be between 1 and {MAX_AFFINITY_SECONDS}, got {ttl_seconds}")
