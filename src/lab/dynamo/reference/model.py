"""The forward pass: a Llama-family decoder over a ragged batch and a paged KV cache.

A step's tokens, of all sequences, stand in one row after the other, so every matrix product is one product for the
whole batch. Only attention needs to know whose token is whose: that is what `Batch.groups` holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo.reference.config import ModelConfig, RopeScaling
from dynamo.reference.kv_transfer.base import Layout
from dynamo.reference.lora import Adapter, LowRank
from dynamo.reference.tensor_files import Array
from dynamo.reference.weights import Layer, Weights

Ints = npt.NDArray[np.int64]

MASKED: Final = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence to be computed now; those before `start` are in the cache."""

    tokens: Sequence[int]
    start: int  # position of the first of them
    blocks: Sequence[int]  # the sequence's block table; covers start + len(tokens) positions
    adapter: Adapter | None = None
    sight: Adapter | None = None  # acts in addition, from the position `pictured` on
    pictured: int = 0


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Pieces that attend together: the same number of tokens each, and block tables of about the same length."""

    rows: Ints  # (pieces, tokens): where in the batch
    tables: Ints  # (pieces, blocks), shorter ones filled up with block 0, which the mask hides
    mask: Array  # (pieces, 1, tokens, positions): 0 where a token may attend, -inf elsewhere


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, laid out."""

    tokens: Ints
    positions: Ints
    slots: Ints  # where in the cache each token's key and value go: block * block_size + offset
    groups: tuple[AttentionGroup, ...]
    last_rows: Ints  # of each piece, in the order given
    adapted: tuple[tuple[Adapter, Ints], ...] = ()  # the adapters of this step, and the rows of each


class KvCache:
    """Keys and values of every layer, in blocks. The block pool knows the owner of each block.

    Heads come first, so that gathering a block table copies whole blocks and yields what attention multiplies.
    """

    def __init__(self, config: ModelConfig, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.layout = Layout(config.layers, config.kv_heads, block_size, config.head_dim)
        self._shape = (config.layers, config.kv_heads, blocks * block_size, config.head_dim)
        self.restore()

    def restore(self) -> None:
        """Allocate the memory again, empty."""
        # Zeros, not empty: masked positions are multiplied by 0, and 0 times what memory held before may be NaN.
        self.keys: Array = np.zeros(self._shape, np.float32)
        self.values: Array = np.zeros(self._shape, np.float32)

    def release(self) -> None:
        """Let the memory go, until `restore`."""
        self.keys = self.values = np.zeros((*self._shape[:2], 0, self._shape[3]), np.float32)

    def write(self, layer: int, slots: Ints, keys: Array, values: Array) -> None:
        """Write the keys and values of one layer, each (heads, tokens, head_dim)."""
        self.keys[layer][:, slots] = keys
        self.values[layer][:, slots] = values

    def read(self, layer: int, tables: Ints) -> tuple[Array, Array]:
        """Both as (heads, pieces, positions, head_dim)."""
        return self._gather(self.keys[layer], tables), self._gather(self.values[layer], tables)

    def page(self, block: int) -> bytes:
        """Return one block, packed as in `Layout`; for another worker."""
        at = slice(block * self.block_size, (block + 1) * self.block_size)
        return self.keys[:, :, at].tobytes() + self.values[:, :, at].tobytes()

    def put_page(self, block: int, page: memoryview) -> None:
        """Write what another worker's `page` returned."""
        shape = (2, *self.keys.shape[:2], self.block_size, self.keys.shape[3])
        at = slice(block * self.block_size, (block + 1) * self.block_size)
        self.keys[:, :, at], self.values[:, :, at] = np.frombuffer(page, np.float32).reshape(shape)

    def arrays(self) -> dict[str, Array]:
        """Return where the blocks lie, for transports that read memory."""
        return {"keys": self.keys, "values": self.values}

    def _gather(self, cache: Array, tables: Ints) -> Array:
        heads, slots, head_dim = cache.shape
        blocks = cache.reshape(heads, slots // self.block_size, self.block_size * head_dim)
        pieces, length = tables.shape
        return blocks.take(tables, axis=1).reshape(heads, pieces, length * self.block_size, head_dim)


def make_batch(pieces: Sequence[Piece], block_size: int) -> Batch:
    """Lay pieces out for one step; pure arithmetic."""
    counts = [len(piece.tokens) for piece in pieces]
    ends = np.cumsum(counts)
    total = int(ends[-1])
    spans = list(zip(pieces, counts, strict=True))
    positions = np.fromiter((at for p, n in spans for at in range(p.start, p.start + n)), np.int64, total)
    slots = np.fromiter((slot for p, n in spans for slot in _slots(p, n, block_size)), np.int64, total)
    tokens = np.fromiter((token for piece in pieces for token in piece.tokens), np.int64, total)
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        blocks = -(-(piece.start + count) // block_size)
        # One token each: together, padded to the next power of two at most. Several: prompts, each on its own.
        key = (0, blocks.bit_length()) if count == 1 else (1, number)
        alike.setdefault(key, []).append(number)
    groups = tuple(_group([pieces[n] for n in members], ends[members], block_size) for members in alike.values())
    return Batch(tokens, positions, slots, groups, ends - 1, _adapted(pieces, counts, ends))


def _adapted(pieces: Sequence[Piece], counts: Sequence[int], ends: Ints) -> tuple[tuple[Adapter, Ints], ...]:
    rows: dict[Adapter, list[Ints]] = {}
    for piece, count, end in zip(pieces, counts, ends, strict=True):
        if piece.adapter is not None:
            rows.setdefault(piece.adapter, []).append(np.arange(end - count, end))
        if piece.sight is not None and piece.pictured < piece.start + count:
            skipped = max(piece.pictured - piece.start, 0)
            rows.setdefault(piece.sight, []).append(np.arange(end - count + skipped, end))
    return tuple((adapter, np.concatenate(parts)) for adapter, parts in rows.items())


def _slots(piece: Piece, count: int, block_size: int) -> Sequence[int] | Ints:
    if count == 1:  # nearly all of them, and not worth an array
        return (piece.blocks[piece.start // block_size] * block_size + piece.start % block_size,)
    positions = np.arange(piece.start, piece.start + count)
    first = piece.start // block_size
    table = np.array(piece.blocks[first : (piece.start + count - 1) // block_size + 1], np.int64)
    slots: Ints = table[positions // block_size - first] * block_size + positions % block_size
    return slots


def _group(pieces: Sequence[Piece], ends: Ints, block_size: int) -> AttentionGroup:
    count = len(pieces[0].tokens)
    starts = np.array([piece.start for piece in pieces])
    width = -(-(int(starts.max()) + count) // block_size)
    tables = np.zeros((len(pieces), width), np.int64)
    for row, piece in enumerate(pieces):
        used = piece.blocks[:width]
        tables[row, : len(used)] = used
    rows = (ends - count)[:, None] + np.arange(count)
    looking = starts[:, None] + np.arange(count)  # (pieces, tokens)
    hidden = np.arange(width * block_size) > looking[:, :, None]
    return AttentionGroup(rows, tables, np.where(hidden, MASKED, np.float32(0))[:, None])


class TransformerModel:
    """The weights and what to do with them. Keeps no state between calls: that is in the cache it is given."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._scale = np.float32(1 / math.sqrt(config.head_dim))

    def forward(self, batch: Batch, cache: KvCache) -> Array:
        """Compute a batch, write its keys and values to the cache; the final hidden states, (tokens, hidden)."""
        eps = self.config.norm_eps
        hidden: Array = self.weights.embedding[batch.tokens]
        angles = batch.positions.astype(np.float32)[:, None, None] * self._frequencies
        turn = np.cos(angles), np.sin(angles)
        for number, layer in enumerate(self.weights.layers):
            attended = self._attend(number, layer, rms_norm(hidden, layer.input_norm, eps), turn, batch, cache)
            added = linear(attended, layer.output, layer.output_bias)
            for adapter, rows in batch.adapted:
                add_rows(added, attended, rows, adapter.layers[number].output)
            hidden += added  # ours: the embedding's rows were gathered
            normed = rms_norm(hidden, layer.mlp_norm, eps)
            gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
            for adapter, rows in batch.adapted:
                add_rows(gate_up, normed, rows, adapter.layers[number].gate_up)
            gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
            inner = silu(gate) * up
            added = linear(inner, layer.down, layer.down_bias)
            for adapter, rows in batch.adapted:
                add_rows(added, inner, rows, adapter.layers[number].down)
            hidden += added
        return rms_norm(hidden, self.weights.final_norm, eps)

    def logits(self, hidden: Array) -> Array:
        """Return (tokens, vocabulary) of some rows of what `forward` returned."""
        return np.ascontiguousarray(linear(hidden, self.weights.head, None))

    def _attend(
        self, number: int, layer: Layer, hidden: Array, turn: tuple[Array, Array], batch: Batch, cache: KvCache
    ) -> Array:
        c = self.config
        tokens = len(hidden)
        flat = linear(hidden, layer.qkv, layer.qkv_bias)
        for adapter, rows in batch.adapted:
            add_rows(flat, hidden, rows, adapter.layers[number].qkv)
        qkv = np.ascontiguousarray(flat).reshape(tokens, c.heads + 2 * c.kv_heads, c.head_dim)
        turning, values = qkv[:, : -c.kv_heads], qkv[:, -c.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            turning[:, : c.heads] = rms_norm(turning[:, : c.heads], layer.q_norm, c.norm_eps)
            turning[:, c.heads :] = rms_norm(turning[:, c.heads :], layer.k_norm, c.norm_eps)
        turned = rotate(turning, turn)
        queries, keys = turned[:, : c.heads], turned[:, c.heads :]
        cache.write(number, batch.slots, keys.swapaxes(0, 1), values.swapaxes(0, 1))
        out = np.empty((tokens, c.heads * c.head_dim), np.float32)
        for group in batch.groups:
            out[group.rows] = self._attend_group(queries[group.rows], group, *cache.read(number, group.tables))
        return out

    def _attend_group(self, queries: Array, group: AttentionGroup, keys: Array, values: Array) -> Array:
        """Return `queries`: (pieces, tokens, heads, head_dim). A key head serves `share` query heads."""
        c = self.config
        pieces, count = group.rows.shape
        share = c.heads // c.kv_heads
        split = queries.reshape(pieces, count, c.kv_heads, share, c.head_dim).transpose(2, 0, 3, 1, 4)
        flat = split.reshape(c.kv_heads, pieces, share * count, c.head_dim)
        flat *= self._scale  # a copy: the rows were gathered
        scores = (flat @ keys.swapaxes(2, 3)).reshape(c.kv_heads, pieces, share, count, -1)
        scores += group.mask
        softmax_in_place(scores)
        mixed: Array = np.matmul(scores.reshape(c.kv_heads, pieces, share * count, -1), values)
        joined = mixed.reshape(c.kv_heads, pieces, share, count, c.head_dim).transpose(1, 3, 0, 2, 4)
        return joined.reshape(pieces, count, c.heads * c.head_dim)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Array:
    """Radians per position of each pair of a head, stretched by `scaling`."""
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain.astype(np.float32)
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32)
    # llama3: slow pairs are stretched, fast ones are not, those between are blended.
    turns = scaling.original_context * plain / (2 * math.pi)  # full circles within the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (keep * plain + (1 - keep) * plain / scaling.factor).astype(np.float32)


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return `x @ weight.T + bias`. The result lies in memory by columns, which costs nothing to add or to multiply on with."""
    # Not `x @ weight.T`: for the few rows of a decode step, BLAS is twice as fast with the large matrix first.
    product: Array = (weight @ x.T).T
    if bias is not None:
        product += bias
    return product


def add_rows(total: Array, x: Array, rows: Ints, low_rank: LowRank | None) -> None:
    """Add what an adapter makes of some rows of `x`, in place."""
    if low_rank is not None:
        total[rows] += low_rank.of(x[rows])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis."""
    mean_square = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    normed: Array = x * (1 / np.sqrt(mean_square + np.float32(eps)))[..., None] * weight
    return normed


def silu(x: Array) -> Array:
    # tanh cannot overflow, where exp(-x) would for a very negative x.
    gated: Array = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(x * np.float32(0.5)))
    return gated


def rotate(x: Array, turn: tuple[Array, Array]) -> Array:
    """Turn the pairs (i, i + half) of each head; `x` is (tokens, heads, head_dim)."""
    cos, sin = turn
    half = x.shape[2] // 2
    first, second = x[:, :, :half], x[:, :, half:]
    turned = np.empty_like(x)
    turned[:, :, :half] = first * cos - second * sin
    turned[:, :, half:] = second * cos + first * sin
    return turned


def softmax_in_place(scores: Array) -> None:
    """Over the last axis. Every row has a position it may attend to, so the sum is never 0."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
