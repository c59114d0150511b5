"""From a directory of safetensors files to the arrays the forward pass multiplies with.

The format is read here, in one page, rather than through the `safetensors` package: that one hands bfloat16 to NumPy
only where another package teaches NumPy the type, and the format is a length, a JSON header and raw data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument
from dynamo.reference.config import ModelConfig

__all__ = ["NO_WEIGHTS", "Layer", "Weights", "load_weights", "open_tensors", "read_tensors", "weight_bytes"]

Array = npt.NDArray[np.float32]

HEADER_LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Matrices are (out, in); those that read the same input are stacked, to be one product."""

    input_norm: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: Array
    output_bias: Array | None
    mlp_norm: Array
    gate_up: Array
    gate_up_bias: Array | None
    down: Array
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model, float32."""

    embedding: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array  # the embedding itself when they are tied
    classes: Array | None = None  # (labels, hidden), of a model that classifies


# What a model that sleeps has.
NO_WEIGHTS: Final = Weights(np.empty((0, 0), np.float32), (), np.empty(0, np.float32), np.empty((0, 0), np.float32))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


def load_weights(directory: Path, config: ModelConfig) -> Weights:
    """Read every tensor the model needs, as float32.

    Raises InvalidArgument naming the file and the tensor for what is missing, cut short, of another shape, of a type
    that is not supported, or not finite.
    """
    tensors = open_tensors(directory)
    take, arena = _Taker(tensors, directory), _Arena(tensors.values())
    hidden = config.hidden_size
    # Models without a head were often saved without the name of the part that holds the rest.
    prefix = "model." if "model.embed_tokens.weight" in tensors or "embed_tokens.weight" not in tensors else ""
    embedding = arena.keep(take(f"{prefix}embed_tokens.weight", config.vocab_size, hidden))
    tied = config.tied_embeddings
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(take, arena, f"{prefix}layers.{number}", config) for number in range(config.layers)),
        final_norm=take(f"{prefix}norm.weight", hidden),
        head=embedding if tied else arena.keep(take("lm_head.weight", config.vocab_size, hidden)),
        classes=take("score.weight", len(config.labels), hidden) if config.labels else None,
    )


def read_tensors(path: Path) -> dict[str, Array]:
    """Read every tensor of one file as float32. Raises InvalidArgument naming the file for what is missing or broken."""
    if not path.is_file():
        raise InvalidArgument(f"there is no file {path}")
    tensors = dict(_header(path))
    take = _Taker(tensors, path.parent)
    return {name: take(name, *tensor.shape) for name, tensor in tensors.items()}


def weight_bytes(config: ModelConfig) -> int:
    """Return the memory, in bytes, that the weights take as float32, before any weight is read."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    per_layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tied_embeddings else 2)
    return 4 * (c.layers * per_layer + embeddings + c.hidden_size)


def _layer(take: _Taker, arena: _Arena, prefix: str, config: ModelConfig) -> Layer:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.heads * head_dim, config.kv_heads * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)]
    gate_up = [("gate_proj", inner), ("up_proj", inner)]

    def stacked(parent: str, parts: list[tuple[str, int]]) -> Array:
        return arena.keep(*(take(f"{parent}.{name}.weight", rows, hidden) for name, rows in parts))

    def stacked_bias(parent: str, parts: list[tuple[str, int]], *, present: bool) -> Array | None:
        return np.concatenate([take(f"{parent}.{name}.bias", rows) for name, rows in parts]) if present else None

    return Layer(
        input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=stacked(attention, qkv),
        qkv_bias=stacked_bias(attention, qkv, present=config.qkv_bias),
        q_norm=take(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=take(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
        output=arena.keep(take(f"{attention}.o_proj.weight", hidden, wide)),
        output_bias=take(f"{attention}.o_proj.bias", hidden) if config.output_bias else None,
        mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=stacked(mlp, gate_up),
        gate_up_bias=stacked_bias(mlp, gate_up, present=config.mlp_bias),
        down=arena.keep(take(f"{mlp}.down_proj.weight", hidden, inner)),
        down_bias=take(f"{mlp}.down_proj.bias", hidden) if config.mlp_bias else None,
    )


class _Arena:
    """One piece of memory for all matrices: the system gives it large pages, and a step reads all of it (5 % of its time)."""

    ALIGNED_ITEMS: Final = 16  # a cache line

    def __init__(self, tensors: Iterable[_Tensor]) -> None:
        """Room for `tensors`; what is not used is never touched, and costs nothing."""
        self._items = np.empty(sum(math.prod(t.shape) + self.ALIGNED_ITEMS for t in tensors), np.float32)
        self._used = 0

    def keep(self, *parts: Array) -> Array:
        """Return stacked copies of the matrices."""
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        stacked = self._items[self._used : self._used + rows * columns].reshape(rows, columns)
        np.concatenate(parts, out=stacked)
        self._used += -(-stacked.size // self.ALIGNED_ITEMS) * self.ALIGNED_ITEMS
        return stacked


@dataclass(frozen=True)
class _Taker:
    """`take(name, *shape)`: one tensor, checked."""

    tensors: Mapping[str, _Tensor]
    directory: Path

    def __call__(self, name: str, *shape: int) -> Array:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidArgument(f"{self.directory}: there is no tensor {name}; the model needs it")
        if tensor.shape != shape:
            raise InvalidArgument(
                f"{tensor.path}: {name} has the shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        array = _read(tensor)
        if not np.isfinite(array).all():
            raise InvalidArgument(f"{tensor.path}: {name} holds values that are not finite; the file is broken")
        return array


def _read(tensor: _Tensor) -> Array:
    count = math.prod(tensor.shape)
    code = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype]
    with tensor.path.open("rb") as file:
        raw = np.fromfile(file, dtype=code, count=count, offset=tensor.offset)
    if raw.size != count:
        raise InvalidArgument(f"{tensor.path} ended early; copy the file again")
    if tensor.dtype == "BF16":  # the upper half of a float32
        widened: Array = (raw.astype(np.uint32) << 16).view(np.float32)
        return widened.reshape(tensor.shape)
    return raw.astype(np.float32, copy=False).reshape(tensor.shape)


def open_tensors(directory: Path) -> dict[str, _Tensor]:
    """Return where every tensor of `model.safetensors`, or of the shards its index lists, lies."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return dict(_header(single))
    if not index.is_file():
        raise InvalidArgument(f"{directory}: there is neither {single.name} nor {index.name}")
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        shards = sorted(set(names.values()))
        strays = [shard for shard in shards if Path(shard).name != shard]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{index} must map tensors to files under `weight_map`: {error!r}") from error
    if strays:
        raise InvalidArgument(f"{index}: {strays[0]!r} is not a file beside it")
    found: dict[str, _Tensor] = {}
    for shard in shards:
        if not (directory / shard).is_file():
            raise InvalidArgument(f"{index} names {shard}, which does not exist; fetch the model again")
        found.update((name, tensor) for name, tensor in _header(directory / shard) if names.get(name) == shard)
    return found


def _header(path: Path) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of one file, each checked to lie inside it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if size < HEADER_LENGTH_BYTES or length > min(size - HEADER_LENGTH_BYTES, MAX_HEADER_BYTES):
            raise InvalidArgument(f"{path} is not a whole safetensors file; copy it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [(name, _entry(path, name, entry, length, size)) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} has a broken safetensors header: {error!r}") from error
    yield from entries


def _entry(path: Path, name: str, entry: Mapping[str, Any], header_bytes: int, file_bytes: int) -> _Tensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    offset = HEADER_LENGTH_BYTES + header_bytes
    if dtype not in ITEM_BYTES:
        raise InvalidArgument(f"{path}: {name} is {dtype}; supported are {', '.join(ITEM_BYTES)}")
    if not 0 <= begin <= end or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise InvalidArgument(f"{path}: {name} is {end - begin} bytes long, its shape {list(shape)} needs another size")
    if offset + end > file_bytes:
        raise InvalidArgument(f"{path} ends before the data of {name}; copy the file again")
    return _Tensor(path, dtype, shape, offset + begin)
