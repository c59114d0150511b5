"""LoRA adapters: from a PEFT directory to low-rank matrices that are added to a model's own, for some rows of a batch.

Adapters are never merged into the weights: requests with different ones, and with none, share a step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dynamo.contract.requests.json_files import read_object
from dynamo.errors import InvalidArgument
from dynamo.reference.config import ModelConfig
from dynamo.reference.tensor_files import Array, read_tensors

MAX_RANK: Final = 512
TENSOR: Final = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z]+)_proj\.lora_([AB])\.weight"
)
# Options of the format that would change the result; the only value that is computed here.
ONLY: Final[dict[str, object]] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "alpha_pattern": {},
    "lora_bias": False,
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """`x @ a.T @ b.T`, to be added to what a weight makes of `x`. Scaled already."""

    a: Array  # (rank, in)
    b: Array  # (out, rank)

    def of(self, x: Array) -> Array:
        narrow: Array = x @ self.a.T
        added: Array = narrow @ self.b.T
        return added


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """One decoder layer's additions, for the same stacks of matrices as its weights; None: nothing to add."""

    qkv: LowRank | None
    output: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One loaded adapter. Another one of the same name is another adapter."""

    name: str
    directory: Path
    rank: int
    layers: tuple[AdapterLayer, ...]


def load_adapter(name: str, directory: Path, config: ModelConfig) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`; blocking.

    Raises InvalidArgument naming the file and the field or tensor for what is missing, wrong, or not supported.
    """
    path = directory / "adapter_config.json"
    options = read_object(path)
    for field, only in ONLY.items():
        value = options.get(field)
        if value is not None and value != only and (value or only):
            raise InvalidArgument(
                f"{path}: {field} must be {json.dumps(only)} (nothing else is supported), got {value!r}"
            )
    rank, alpha = options.get("r"), options.get("lora_alpha")
    if not isinstance(rank, int) or not 0 < rank <= MAX_RANK:
        raise InvalidArgument(f"{path}: r must be an integer from 1 to {MAX_RANK}, got {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise InvalidArgument(f"{path}: lora_alpha must be a number, got {alpha!r}")
    path = directory / "adapter_model.safetensors"
    is_rooted = options.get("use_rslora") is True
    pairs = _paired(read_tensors(path), path, config, lambda own: alpha / (math.sqrt(own) if is_rooted else own))
    return Adapter(name, directory, rank, tuple(_layer(pairs, number, config) for number in range(config.layers)))


def unscaled_adapter(name: str, path: Path, tensors: Mapping[str, Array], config: ModelConfig) -> Adapter:
    """Return the adapter of these tensors of a file, named as PEFT names them, each pair added as it is.

    Raises InvalidArgument naming the file and the tensor for what is missing or wrong.
    """
    pairs = _paired(tensors, path, config, lambda own: 1.0)
    rank = max(len(pair.a) for pair in pairs.values())
    return Adapter(name, path.parent, rank, tuple(_layer(pairs, number, config) for number in range(config.layers)))


def _paired(
    tensors: Mapping[str, Array], path: Path, config: ModelConfig, scale: Callable[[int], float]
) -> dict[tuple[int, str], LowRank]:
    """Return the matrices by (layer, projection), scaled by their rank, with every shape checked against the model's."""
    sizes = _sizes(config)
    found: dict[tuple[int, str], dict[str, Array]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None or match[2] not in sizes or int(match[1]) >= config.layers:
            raise InvalidArgument(f"{path}: there is no place for {name} in this model")
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    if not found:
        raise InvalidArgument(f"{path} holds no tensor")
    pairs = {}
    for (layer, part), both in found.items():
        if len(both) < 2:
            raise InvalidArgument(f"{path}: layer {layer}, {part}_proj has only one of lora_A and lora_B")
        a, b = both["A"], both["B"]
        outward, inward = sizes[part]
        rank = a.shape[0] if a.ndim == 2 else 0
        if not 0 < rank <= MAX_RANK or a.shape != (rank, inward) or b.shape != (outward, rank):
            raise InvalidArgument(
                f"{path}: layer {layer}, {part}_proj has the shapes {list(a.shape)} and {list(b.shape)}, "
                f"the model needs [r, {inward}] and [{outward}, r]"
            )
        pairs[layer, part] = LowRank(a, b * np.float32(scale(rank)))
    return pairs


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q": (wide, hidden),
        "k": (narrow, hidden),
        "v": (narrow, hidden),
        "o": (hidden, wide),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }


def _layer(pairs: Mapping[tuple[int, str], LowRank], number: int, config: ModelConfig) -> AdapterLayer:
    sizes = _sizes(config)

    def stacked(*parts: str) -> LowRank | None:
        return _stacked([(sizes[part][0], pairs.get((number, part))) for part in parts])

    return AdapterLayer(stacked("q", "k", "v"), stacked("o"), stacked("gate", "up"), stacked("down"))


def _stacked(parts: Sequence[tuple[int, LowRank | None]]) -> LowRank | None:
    """Additions to matrices that are stacked, as one: each part's rank is its own, its rows are its own."""
    present = [part for _, part in parts if part is not None]
    if not present:
        return None
    a = np.concatenate([part.a for part in present])
    b = np.zeros((sum(rows for rows, _ in parts), len(a)), np.float32)
    row = column = 0
    for rows, part in parts:
        if part is not None:
            rank = part.a.shape[0]
            b[row : row + rows, column : column + rank] = part.b
            column += rank
        row += rows
    return LowRank(a, b)
