"""Small random models, written the way real ones are, and an engine core over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dynamo.reference import ReferenceEngine
from dynamo.reference.core import Core, Emission, Failure
from dynamo.reference.loading import Options, load_core
from dynamo.text import PLAIN_TEMPLATE
from support.patience import PATIENCE_SECONDS
from support.random_weights import random_tensors
from support.tiny_model import tiny_tokenizer

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 256,
    "eos_token_id": 96,
    "bos_token_id": 1,
    "hidden_act": "silu",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-biased-linear": {
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
    },
    "llama3": {
        **LLAMA,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 1},
}


def write_model(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config) if tensors is None else tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory per entry of `CONFIGS`."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer beside it: it says anything, in no language. `</s>` ends it.

    The tokenizer has `<think>`, `</think>` and `<tool_call>` as tokens; the model knows eight tokens more than it.
    """
    tokenizer = tiny_tokenizer(320)
    tokenizer.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    directory = tmp_path_factory.mktemp("speaking")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    size = tokenizer.get_vocab_size() + 8
    tied = {"tie_word_embeddings": True, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    return write_model(directory, {**LLAMA, **tied, "vocab_size": size, "eos_token_id": [1, 2], "bos_token_id": 0})


@pytest.fixture(scope="session")
def configs() -> dict[str, dict[str, Any]]:
    return CONFIGS


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture(scope="session")
def tensors_of() -> Callable[..., dict[str, np.ndarray]]:
    return random_tensors


@pytest.fixture
def core_of(models: dict[str, Path]) -> Callable[..., Core]:
    """A core over one of the models; `blocks` of 4 tokens bound its cache."""

    def build(
        name: str = "llama", *, blocks: int = 512, sequences: int = 32, step_tokens: int = 512, **options: Any
    ) -> Core:
        plain = load_core(models[name], Options(block_size=4, kv_cache_mb=8, max_num_seqs=32))
        return Core(
            plain.model,
            blocks=blocks,
            block_size=4,
            context_length=min(blocks * 4, 256),
            max_sequences=sequences,
            max_step_tokens=step_tokens,
            **options,
        )

    return build


def hold_after(engine: ReferenceEngine, tokens: int = 1) -> None:
    """Have the engine's thread compute this many steps that yield tokens, and wait for the next command, once.

    Else the thread may have computed the whole answer before a busy machine lets the test say anything.
    """
    steps: Any = engine._steps
    core: Any = steps._core
    step, left = core.step, tokens

    def held_step() -> list[Emission | Failure]:
        nonlocal left
        if not left:
            core.step = step
            with steps._wake:
                assert steps._wake.wait_for(lambda: steps._inbox or steps._is_closing, PATIENCE_SECONDS)
        found: list[Emission | Failure] = step()
        left -= bool(found)
        return found

    core.step = held_step
