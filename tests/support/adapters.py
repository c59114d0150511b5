"""Random LoRA adapters, written as PEFT writes them, and the model they amount to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ALL = ("q", "k", "v", "o", "gate", "up", "down")


def write_adapter(
    directory: Path,
    model: dict[str, np.ndarray],
    *,
    parts: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 1,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write an adapter for a model's tensors, and return those tensors with the adapter merged into them."""
    rng = np.random.default_rng(seed)
    alpha = options.pop("lora_alpha", 2 * rank)
    scale = alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)
    tensors: dict[str, np.ndarray] = {}
    merged = dict(model)
    for name, weight in model.items():
        if not any(name.endswith(f".{part}_proj.weight") for part in parts):
            continue
        a = rng.standard_normal((rank, weight.shape[1])).astype(np.float32) / math.sqrt(weight.shape[1])
        b = rng.standard_normal((weight.shape[0], rank)).astype(np.float32) / math.sqrt(rank)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
        merged[name] = weight + np.float32(scale) * (b @ a)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": list(parts),
        **options,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return merged
