"""Weights of the models that tests of the reference engine compute with."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_tensors(config: dict[str, Any], seed: int = 7) -> dict[str, np.ndarray]:
    """Every tensor such a model has; large enough values that greedy decoding is no tie."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    wide, narrow = heads * head_dim, config["num_key_value_heads"] * head_dim
    qwen2, qwen3 = (config["architectures"] == [f"Qwen{n}ForCausalLM"] for n in (2, 3))
    biased = config.get("attention_bias", False)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4, "model.norm.weight": norm(hidden)}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        tensors[f"{at}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}.post_attention_layernorm.weight"] = norm(hidden)
        for name, rows, columns in (
            ("q", wide, hidden),
            ("k", narrow, hidden),
            ("v", narrow, hidden),
            ("o", hidden, wide),
        ):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, columns)
            if biased or (qwen2 and name != "o"):
                tensors[f"{at}.self_attn.{name}_proj.bias"] = matrix(rows)
        if qwen3:
            tensors[f"{at}.self_attn.q_norm.weight"] = norm(head_dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = norm(head_dim)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
            if config.get("mlp_bias"):
                tensors[f"{at}.mlp.{name}_proj.bias"] = matrix(rows)
    return tensors
