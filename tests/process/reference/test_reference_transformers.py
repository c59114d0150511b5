"""The same weights in `transformers`: the logits are the same, for every architecture and every option of it.

Optional (`make test-engines`): it needs the `engines` extra.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.reference.config import read_model_config
from dynamo.reference.model import KvCache, Piece, TransformerModel, make_batch
from dynamo.reference.weights import load_weights

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TOLERANCE = 5e-5  # of logits whose largest are 6 to 8: both sides are float32, and sum in different orders
LENGTH, BLOCK = 90, 8
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Llama": [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True, "rope_theta": 500_000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": 24},
        {"rope_scaling": LLAMA3, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ],
    "Qwen2": [{}, {"tie_word_embeddings": True, "use_sliding_window": False, "rope_theta": 1_000_000.0}],
    "Qwen3": [
        {"head_dim": 32},
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 8, "use_sliding_window": False},
        {"head_dim": 16, "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
}
CASES = [(name, number) for name, options in OPTIONS.items() for number in range(len(options))]


@pytest.fixture(scope="module")
def libraries() -> Iterator[tuple[Any, Any]]:
    torch = pytest.importorskip("torch", reason="needs the `engines` extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the `engines` extra: transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch, transformers
    torch.set_num_threads(threads)


def theirs(libraries: tuple[Any, Any], name: str, options: dict[str, Any], directory: Path, seed: int) -> Any:
    """A random model of theirs, written where we can read it."""
    torch, transformers = libraries
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=8,
        **{"num_key_value_heads": 2, "max_position_embeddings": 256, **copy.deepcopy(options)},
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():  # as they come, all norms are 1, all biases 0, and all logits nearly equal
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory)
    return model


def ours(directory: Path, tokens: list[int], cuts: list[int]) -> np.ndarray:
    """The logits of every position, computed in steps that end at `cuts`."""
    config = read_model_config(directory)
    model = TransformerModel(config, load_weights(directory, config))
    blocks = -(-len(tokens) // BLOCK)
    cache = KvCache(config, blocks, BLOCK)
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        batch = make_batch([Piece(tokens[start:end], start, list(range(blocks)))], BLOCK)
        rows.append(model.logits(model.forward(batch, cache)))
    return np.concatenate(rows)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_logits_are_those_of_transformers(name: str, number: int, libraries: tuple[Any, Any], tmp_path: Path) -> None:
    torch, _ = libraries
    for seed in range(3):
        directory = tmp_path / str(seed)
        model = theirs(libraries, name, OPTIONS[name][number], directory, seed)
        tokens = np.random.default_rng(seed).integers(0, 211, LENGTH).tolist()
        with torch.no_grad():
            wanted = model(torch.tensor([tokens])).logits[0].numpy()
        found = ours(directory, tokens, [])
        stepped = ours(directory, tokens, [7, 40, *range(60, LENGTH)])  # in pieces, then token by token
        scale = np.abs(wanted).max()
        assert scale > 1
        worst = max(np.abs(found - wanted).max(), np.abs(stepped - wanted).max())
        print(f"{name} {json.dumps(OPTIONS[name][number])} seed {seed}: off by {worst:.1e}, logits to {scale:.1f}")
        assert worst < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_read_exactly(dtype: str, libraries: tuple[Any, Any], tmp_path: Path) -> None:
    torch, _ = libraries
    model = theirs(libraries, "Llama", {}, tmp_path / "float", 5).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / dtype, max_shard_size="100KB")
    assert (tmp_path / dtype / "model.safetensors.index.json").is_file()
    again = type(model).from_pretrained(tmp_path / dtype, dtype=torch.float32).eval()
    tokens = list(range(5, 60))
    with torch.no_grad():
        wanted = again(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(ours(tmp_path / dtype, tokens, []) - wanted).max() < TOLERANCE
