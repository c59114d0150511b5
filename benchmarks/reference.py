"""How fast the reference engine is, and where its CPU time goes: one core, a random model, greedy, no network.

    python benchmarks/reference.py [--hidden 256] [--layers 6] [--tokens 200]

"model" is the forward pass, "engine" what the step thread does beside it (plan, sample, chunks), "loop" the event loop
with `generate` and its reader. CPU time, because wall time on a shared machine is noise; tokens/s is wall time.
"""

# ruff: noqa: E402 - the variables below must be set before NumPy is imported
from __future__ import annotations

import os

for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[variable] = "1"  # read when NumPy is imported

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dynamo.common.backend.testing import mock_context
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.core import Core
from dynamo.reference.model import Model

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 30


def write_model(directory: Path, *, hidden: int, layers: int, vocabulary: int, seed: int = 1) -> int:
    """A random Llama; returns its number of parameters."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, inner = hidden // 32, max(hidden // 128, 1), hidden * 8 // 3 // 32 * 32
    narrow = kv_heads * 32

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for number in range(layers):
        at = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = np.ones(hidden, np.float32)
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return sum(tensor.size for tensor in tensors.values())


@dataclass
class Clock:
    """CPU seconds of the step thread, in the model and in all of a step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "step": 0.0})

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.seconds[name] += time.thread_time() - begun

        return wrapper


async def one(engine: ReferenceEngine, number: int, tokens: int) -> float:
    """Serve one request; seconds to its first token."""
    prompt = np.random.default_rng(number).integers(0, 1000, PROMPT_TOKENS).tolist()
    body: Any = {
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    begun, first = time.perf_counter(), 0.0
    async with aclosing(engine.generate(body, mock_context())) as stream:
        async for _ in stream:
            first = first or time.perf_counter() - begun
    return first


async def measure(directory: Path, tokens: int, clock: Clock) -> None:
    engine = ReferenceEngine(directory, Options(prefix_caching=True))
    await engine.start(0)
    try:
        await one(engine, 99, 20)  # warm
        print("batch  tokens/s  first token ms  CPU us/token   model  engine    loop")
        for batch in BATCHES:
            clock.seconds.update(model=0.0, step=0.0)
            begun, cpu = time.perf_counter(), time.process_time()
            firsts = await asyncio.gather(*(one(engine, batch * 100 + n, tokens) for n in range(batch)))
            wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
            model, step = clock.seconds["model"], clock.seconds["step"]
            shares = [part / cpu for part in (model, step - model, cpu - step)]
            total = batch * tokens
            print(
                f"{batch:5}  {total / wall:8.0f}  {max(firsts) * 1e3:14.1f}  {cpu / total * 1e6:12.0f}"
                + "".join(f"  {share:6.1%}" for share in shares)
            )
    finally:
        await engine.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=200, help="per request")
    args = parser.parse_args()
    clock = Clock()
    Model.forward = clock.timed("model", Model.forward)  # type: ignore[method-assign]
    Model.logits = clock.timed("model", Model.logits)  # type: ignore[method-assign]
    Core.step = clock.timed("step", Core.step)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        size = write_model(Path(directory), hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary)
        print(f"{size / 1e6:.1f} M parameters, hidden {args.hidden}, {args.layers} layers, one core, float32")
        asyncio.run(measure(Path(directory), args.tokens, clock))


if __name__ == "__main__":
    main()
