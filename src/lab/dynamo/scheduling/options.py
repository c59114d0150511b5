"""How a simulated engine schedules: its sizes, its policy, and how fast it is beside its timing model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from dynamo.errors import InvalidArgument
from dynamo.scheduling.host_tier import HostTierOptions

BACKENDS: Final = ("vllm", "sglang", "trtllm")
ROLES: Final = ("aggregated", "prefill", "decode")
PREEMPTION_MODES: Final = ("lifo", "fifo")
SCHEDULE_POLICIES: Final = ("fifo", "lpm")
MAX_DRAFTS: Final = 5


class PassTiming(Protocol):
    """How long the work of one pass takes, in ms, before any speedup."""

    def prefill_ms(self, requests: int, mean_input: int, mean_prefix: int) -> float:
        """Return the time to compute prompt tokens: of `requests`, each from `mean_prefix` up to `mean_input` tokens."""

    def decode_ms(self, active_tokens: int, mean_context: int, total_tokens: int) -> float:
        """Return the time of one decode step over `active_tokens` tokens of context in a cache of `total_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """What only the sglang scheduler has."""

    schedule_policy: str = "fifo"
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    clip_max_new_tokens: int = 4096
    schedule_conservativeness: float = 1.0

    def __post_init__(self) -> None:
        _one_of("sglang.schedule_policy", self.schedule_policy, SCHEDULE_POLICIES)
        for name in ("max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens"):
            _at_least(f"sglang.{name}", getattr(self, name), 1)
        _ratio("sglang.schedule_conservativeness", self.schedule_conservativeness)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """One rank of one simulated engine. Raises InvalidArgument that names the field."""

    backend: str = "vllm"
    role: str = "aggregated"
    num_gpu_blocks: int = 16384
    block_size: int = 64
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: no limit but the cache."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption_mode: str = "lifo"
    speedup_ratio: float = 1.0
    """Divides every time. 0: nothing takes time."""
    decode_speedup_ratio: float = 1.0
    """Divides the times of decode steps once more. 0: they take no time."""
    accept_rates: tuple[float, ...] = ()
    """Chance of each draft token to be accepted after the one before it; empty: no speculation."""
    host: HostTierOptions | None = None
    """A second tier of the cache in host memory; None: there is none."""
    sglang: SglangOptions = field(default_factory=SglangOptions)

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("worker_type", self.role, ROLES)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _at_least("num_gpu_blocks", self.num_gpu_blocks, 1)
        _at_least("block_size", self.block_size, 1 if self.backend == "sglang" else 2)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        _ratio("speedup_ratio", self.speedup_ratio)
        _ratio("decode_speedup_ratio", self.decode_speedup_ratio)
        self._check_speculation()
        if self.backend == "trtllm" and self.role != "aggregated":
            raise InvalidArgument(f"worker_type {self.role} is not built for backend trtllm: use vllm or sglang")
        if self.host is not None and (self.backend != "vllm" or not self.enable_prefix_caching):
            raise InvalidArgument("native_host_offload needs backend vllm with enable_prefix_caching")
        if self.backend == "sglang":
            if not self.enable_chunked_prefill:
                raise InvalidArgument("enable_chunked_prefill cannot be false for backend sglang")
            if self.sglang.chunked_prefill_size % self.block_size:
                raise InvalidArgument(
                    f"sglang.chunked_prefill_size must be a multiple of block_size {self.block_size}, "
                    f"got {self.sglang.chunked_prefill_size}"
                )

    def _check_speculation(self) -> None:
        if len(self.accept_rates) > MAX_DRAFTS:
            raise InvalidArgument(f"at most {MAX_DRAFTS} draft tokens, got {len(self.accept_rates)} accept rates")
        for number, rate in enumerate(self.accept_rates):
            if not 0 <= rate <= 1:
                raise InvalidArgument(f"accept_rates[{number}] must be in 0..1, got {rate}")
        if self.accept_rates and self.decode_speedup_ratio != 1:
            raise InvalidArgument(
                f"decode_speedup_ratio must be 1 with speculation (aic_nextn), got {self.decode_speedup_ratio}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_gpu_blocks * self.block_size


def _at_least(name: str, value: int, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        raise InvalidArgument(f"{name} must be an integer of at least {minimum}, got {value!r}")


def _ratio(name: str, value: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise InvalidArgument(f"{name} must be a finite number of at least 0, got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
