"""The forward pass against a second, naive one, and against itself however the tokens are cut into steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.reference.config import read_model_config
from dynamo.reference.model import KvCache, Piece, TransformerModel, make_batch
from dynamo.reference.weights import load_weights
from support.cases import each_case

NAMES = ("llama", "llama-biased-linear", "llama3", "qwen2", "qwen3")
TOLERANCE = 2e-4  # of logits of about 10: float32 against float64
BLOCK = 4


def naive_logits(config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """All positions at once, float64, loops over heads, no cache: written from the papers' formulas."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    x = w["model.embed_tokens.weight"][tokens]

    def norm(v: np.ndarray, name: str) -> np.ndarray:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def project(v: np.ndarray, name: str) -> np.ndarray:
        return v @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turned(v: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(v)
        for pair in range(size // 2):
            angle = position * frequency(config, pair, size)
            a, b = v[pair], v[pair + size // 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (project(h, f"{at}.self_attn.{name}_proj") for name in "qkv")
        mixed = np.zeros((len(tokens), heads * size))
        for head in range(heads):
            mine = slice(head * size, (head + 1) * size)
            theirs = slice(head // (heads // kv_heads) * size, (head // (heads // kv_heads) + 1) * size)
            qs, ks = q[:, mine], k[:, theirs]
            if f"{at}.self_attn.q_norm.weight" in w:
                qs, ks = norm(qs, f"{at}.self_attn.q_norm.weight"), norm(ks, f"{at}.self_attn.k_norm.weight")
            qs = np.array([turned(row, position) for position, row in enumerate(qs)])
            ks = np.array([turned(row, position) for position, row in enumerate(ks)])
            for position in range(len(tokens)):
                scores = ks[: position + 1] @ qs[position] / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                mixed[position, mine] = weights / weights.sum() @ v[: position + 1, theirs]
        x = x + project(mixed, f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = project(h, f"{at}.mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def frequency(config: dict[str, Any], pair: int, size: int) -> float:
    plain = 1 / config["rope_theta"] ** (2 * pair / size)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return plain / scaling["factor"]
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        trained = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength < trained / high:
            return plain
        if wavelength > trained / low:
            return plain / scaling["factor"]
        smooth = (trained / wavelength - low) / (high - low)
        return (1 - smooth) * plain / scaling["factor"] + smooth * plain
    return plain


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def load(directory: Path) -> TransformerModel:
    config = read_model_config(directory)
    return TransformerModel(config, load_weights(directory, config))


def stepped_logits(model: TransformerModel, tokens: list[int], sizes: list[int]) -> np.ndarray:
    """The logits of every position, computed in steps of these sizes, in blocks that lie anywhere."""
    cache = KvCache(model.config, 64, BLOCK)
    table = [int(block) for block in np.random.default_rng(1).permutation(64)]
    rows, start = [], 0
    for size in sizes:
        piece = Piece(tokens[start : start + size], start, table[: -(-(start + size) // BLOCK)])
        rows.append(model.logits(model.forward(make_batch([piece], BLOCK), cache)))
        start += size
    return np.concatenate(rows)


@each_case("name", NAMES)
def test_logits_equal_those_of_a_naive_forward_pass(
    name: str, models: dict[str, Path], configs: dict[str, Any], tensors_of: Callable[..., dict[str, np.ndarray]]
) -> None:
    tokens = prompt(41)
    found = stepped_logits(load(models[name]), tokens, [41])
    assert np.abs(found - naive_logits(configs[name], tensors_of(configs[name]), tokens)).max() < TOLERANCE


@each_case("name", NAMES)
@each_case("sizes", [[1] * 41, [40, 1], [7, 13, 1, 20], [4] * 10 + [1], [16, 16, 9]])
def test_a_prompt_in_pieces_has_the_logits_of_one_shot(name: str, sizes: list[int], models: dict[str, Path]) -> None:
    model, tokens = load(models[name]), prompt(41)
    assert np.abs(stepped_logits(model, tokens, sizes) - stepped_logits(model, tokens, [41])).max() < TOLERANCE


@each_case("name", NAMES)
def test_sequences_of_a_mixed_batch_do_not_see_each_other(name: str, models: dict[str, Path]) -> None:
    model = load(models[name])
    prompts = [prompt(length, seed=length) for length in (1, 3, 4, 5, 8, 17, 30, 2)]
    cache, free = KvCache(model.config, 64, BLOCK), iter(range(64))
    tables = [[next(free) for _ in range(-(-len(tokens) // BLOCK))] for tokens in prompts]
    # All but the last token of the long ones first, so that the second step mixes decodes with whole prompts.
    begun = [n for n, tokens in enumerate(prompts) if len(tokens) > 4]
    model.forward(make_batch([Piece(prompts[n][:-1], 0, tables[n]) for n in begun], BLOCK), cache)
    pieces = [
        Piece(tokens[-1:], len(tokens) - 1, tables[n]) if n in begun else Piece(tokens, 0, tables[n])
        for n, tokens in enumerate(prompts)
    ]
    batch = make_batch(pieces, BLOCK)
    found = model.logits(model.forward(batch, cache)[batch.last_rows])
    for row, tokens in zip(found, prompts, strict=True):
        assert np.abs(row - stepped_logits(model, tokens, [len(tokens)])[-1]).max() < TOLERANCE
