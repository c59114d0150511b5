"""From a directory and a few numbers to a core that can compute, or to a sentence that names the obstacle."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamo.contract.requests.pooling import read_pooling
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.protocol.guided_limits import DEFAULT_GUIDED_LIMITS, GuidedLimits
from dynamo.reference.config import ModelConfig, read_model_config
from dynamo.reference.core import Core
from dynamo.reference.guided import COMPILE_SECONDS
from dynamo.reference.model import TransformerModel
from dynamo.reference.weights import load_weights, weight_bytes

logger = logging.getLogger(__name__)

MB: Final = 1_000_000
MAX_BLOCKS: Final = 1_000_000  # of a model so small that the given memory would hold more than any list should
CGROUP: Final = Path("/sys/fs/cgroup")
MEMORY_INFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Options:
    """How much of everything. Raises InvalidArgument, with the flag's name, for what cannot be."""

    block_size: int = 16  # tokens
    kv_cache_mb: int = 256
    context_length: int | None = None  # tokens; None: the model's, or what the cache holds if that is less
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # longer steps mean fewer of them, and streams that wait longer for their token
    prefix_caching: bool = True
    max_loras: int = 8  # adapters loaded at once
    pooling: str | None = None  # how vectors are made: mean, last or cls; None: as the model's files have it
    normalize: bool | None = None  # whether vectors have the length 1; None: as the model's files have it
    guided: GuidedLimits = DEFAULT_GUIDED_LIMITS
    guided_compile_seconds: float = COMPILE_SECONDS  # of CPU, for one grammar

    def __post_init__(self) -> None:
        if self.max_loras < 0:
            raise InvalidArgument(f"--max-loras must not be negative, got {self.max_loras}")
        for name in ("block_size", "kv_cache_mb", "context_length", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgument(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): every running request gets a token in every step"
            )


def load_core(directory: Path, options: Options, *, available_bytes: int | None = None) -> Core:
    """Read a model and set its cache up. `available_bytes`: memory to stay within; None: what the system has.

    Raises:
        InvalidArgument: the directory or an option is wrong; the message names it.
        EngineShutdown: there is not enough memory.
    """
    config = read_model_config(directory)
    blocks, context_length = plan_cache(config, options)
    check_memory(config, weights=True, cache_tokens=blocks * options.block_size, available_bytes=available_bytes)
    core = Core(
        TransformerModel(config, load_weights(directory, config)),
        blocks=blocks,
        block_size=options.block_size,
        context_length=context_length,
        max_sequences=options.max_num_seqs,
        max_step_tokens=options.max_num_batched_tokens,
        prefix_caching=options.prefix_caching,
    )
    pooling = read_pooling(
        directory, config.hidden_size, labels=config.labels, mode=options.pooling, normalize=options.normalize
    )
    core.limits = replace(core.limits, guided=options.guided, pooling=pooling, generates=config.has_head)
    return core


def plan_cache(config: ModelConfig, options: Options) -> tuple[int, int]:
    """Return (blocks, context length). One request of full length always fits, or the engine could wait for ever."""
    wanted = options.context_length or config.context_length
    if wanted > config.context_length:
        raise InvalidArgument(f"--context-length {wanted} is more than the model's {config.context_length}")
    block_bytes = options.block_size * config.kv_bytes_per_token
    # No use for more than every request at its full length.
    useful = -(-wanted // options.block_size) * options.max_num_seqs
    blocks = min(options.kv_cache_mb * MB // block_bytes, useful, MAX_BLOCKS)
    capacity = blocks * options.block_size
    if capacity < (wanted if options.context_length else min(wanted, 2)):
        needed = -(-(-(-wanted // options.block_size) * block_bytes) // MB)
        raise InvalidArgument(
            f"a KV cache of {options.kv_cache_mb} MB holds {capacity} tokens, the context is {wanted}: "
            f"give --kv-cache-mb {needed}, or a shorter --context-length"
        )
    if capacity < wanted:
        logger.warning(
            "the context is cut from %d to %d tokens, which is what --kv-cache-mb %d holds",
            wanted,
            capacity,
            options.kv_cache_mb,
        )
    return blocks, min(wanted, capacity)


def available_memory_bytes() -> int | None:
    """Return the unused memory, in bytes, of the machine or of our part of it; None where the system does not report it."""
    found = [_machine_bytes(), _container_bytes()]
    return min((value for value in found if value is not None), default=None)


def check_memory(config: ModelConfig, *, weights: bool, cache_tokens: int, available_bytes: int | None = None) -> None:
    """Raises EngineShutdown when the weights (if they are read) and a cache of that size do not fit."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    wanted, cache = weight_bytes(config) if weights else 0, cache_tokens * config.kv_bytes_per_token
    if available is not None and wanted + cache > available:
        raise EngineShutdown(
            f"too little memory: the weights take {wanted // MB} MB and the KV cache {cache // MB} MB, "
            f"{available // MB} MB are available; use a smaller model or a smaller --kv-cache-mb"
        )


def _machine_bytes() -> int | None:
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_bytes() -> int | None:
    try:
        return int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return None
