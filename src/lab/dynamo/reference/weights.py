"""From a directory of safetensors files to the arrays the forward pass multiplies with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dynamo.errors import InvalidArgument
from dynamo.reference.config import ModelConfig
from dynamo.reference.lora import Adapter, unscaled_adapter
from dynamo.reference.picture_codes import FILE, SHAPES, PictureCodes
from dynamo.reference.tensor_files import Array, Taker, Tensor, open_tensors, read_tensors


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

    embedding: Array  # of the vocabulary, and of the codes of pictures behind it
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array  # the embedding of the vocabulary itself when they are tied
    classes: Array | None = None  # (labels, hidden), of a model that classifies
    sight: Adapter | None = None  # acts from the first code of a picture on; None: the model has no codes


# What a model that sleeps has.
NO_WEIGHTS: Final = Weights(np.empty((0, 0), np.float32), (), np.empty(0, np.float32), np.empty((0, 0), np.float32))


def load_weights(directory: Path, config: ModelConfig) -> Weights:
    """Read every tensor the model needs, as float32.

    Raises InvalidArgument naming the file and the tensor for what is missing, cut short, of another shape, of a type
    that is not supported, or not finite.
    """
    tensors = open_tensors(directory)
    codes, sight = _sight(directory, config)
    take, arena = Taker(tensors, directory), _Arena(tensors.values(), more=codes.size)
    hidden = config.hidden_size
    # Models without a head were often saved without the name of the part that holds the rest.
    prefix = "model." if "model.embed_tokens.weight" in tensors or "embed_tokens.weight" not in tensors else ""
    embedding = arena.keep(take(f"{prefix}embed_tokens.weight", config.vocab_size, hidden), codes)
    tied = config.tied_embeddings
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(take, arena, f"{prefix}layers.{number}", config) for number in range(config.layers)),
        final_norm=take(f"{prefix}norm.weight", hidden),
        head=embedding[: config.vocab_size] if tied else arena.keep(take("lm_head.weight", config.vocab_size, hidden)),
        classes=take("score.weight", len(config.labels), hidden) if config.labels else None,
        sight=sight,
    )


def _sight(directory: Path, config: ModelConfig) -> tuple[Array, Adapter | None]:
    """Return the vectors of the codes of pictures, (codes, hidden), and the adapter that acts from them on."""
    none = np.empty((0, config.hidden_size), np.float32)
    if not isinstance(config.vision, PictureCodes):
        return none, None
    path, shape = directory / FILE, (config.known_tokens - config.vocab_size, config.hidden_size)
    tensors = {name: values for name, values in read_tensors(path).items() if name not in SHAPES}
    codes = tensors.pop("embeddings.weight", none)
    if codes.shape != shape:
        raise InvalidArgument(f"{path}: embeddings.weight must have the shape {list(shape)}, got {list(codes.shape)}")
    return codes, unscaled_adapter("sight", path, tensors, config)


def weight_bytes(config: ModelConfig) -> int:
    """Return the memory, in bytes, that the weights take as float32, before any weight is read."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    per_layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    embeddings = c.hidden_size * (c.known_tokens + (0 if c.tied_embeddings else c.vocab_size))
    return 4 * (c.layers * per_layer + embeddings + c.hidden_size)


def _layer(take: Taker, arena: _Arena, prefix: str, config: ModelConfig) -> Layer:
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

    def __init__(self, tensors: Iterable[Tensor], *, more: int = 0) -> None:
        """Room for `tensors` and for `more` numbers; what is not used is never touched, and costs nothing."""
        self._items = np.empty(sum(math.prod(t.shape) + self.ALIGNED_ITEMS for t in tensors) + more, np.float32)
        self._used = 0

    def keep(self, *parts: Array) -> Array:
        """Return stacked copies of the matrices."""
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        stacked = self._items[self._used : self._used + rows * columns].reshape(rows, columns)
        np.concatenate(parts, out=stacked)
        self._used += -(-stacked.size // self.ALIGNED_ITEMS) * self.ALIGNED_ITEMS
        return stacked
