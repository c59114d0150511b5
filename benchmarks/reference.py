"""How fast the reference engine is, and where its CPU time goes: one core, a random model, greedy, no network.

    python benchmarks/reference.py [--hidden 256] [--layers 6] [--tokens 200] [--repeats 5]

"model" is the forward pass, "engine" what the step thread does beside it (plan, sample, chunks), "loop" the event loop
with `generate` and its reader. Where torch is installed, it generates the same tokens from the same weights in turn with
the engine: one thread, a KV cache, whole batches that start and end together (no batching, paging, streams or requests:
only the arithmetic). Last, a worker process of its own is called over its request plane: what serving adds. Figures are
medians. "tokens/s" is per second of CPU, because wall time on a shared machine is noise.
"""

# ruff: noqa: E402 - the variables below must be set before NumPy is imported
from __future__ import annotations

import os

for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[variable] = "1"  # read when NumPy is imported

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from reference_worker import Served, serve, write_tokenizer
from safetensors.numpy import save_file

from dynamo.common.backend.testing import mock_context
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.core import Core
from dynamo.reference.model import TransformerModel

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 30


def write_model(directory: Path, *, hidden: int, layers: int, vocabulary: int, seed: int = 1) -> int:
    """A random Llama; returns its number of parameters."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, inner = hidden // 32, max(hidden // 128, 1), hidden * 8 // 3 // 32 * 32
    narrow = kv_heads * 32

    def matrix(*shape: int) -> np.ndarray:
        drawn: np.ndarray = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return drawn

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


@dataclass(frozen=True)
class Run:
    """One batch, served once."""

    cpu_s: float
    first_s: float = 0.0  # until the last of the first tokens; wall time
    shares: tuple[float, ...] = ()  # of the CPU time: model, engine, loop
    answers: tuple[tuple[int, ...], ...] = ()


def prompt(number: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(0, 1000, PROMPT_TOKENS).tolist()
    return tokens


async def one(engine: ReferenceEngine, number: int, tokens: int) -> tuple[float, tuple[int, ...]]:
    """Serve one request; seconds to its first token, and all of them."""
    body: Any = {
        "token_ids": prompt(number),
        "stop_conditions": {"max_tokens": tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    begun, first, answer = time.perf_counter(), 0.0, []
    async with aclosing(engine.generate(body, mock_context())) as stream:
        async for chunk in stream:
            first = first or time.perf_counter() - begun
            answer += chunk["token_ids"]
    return first, tuple(answer)


async def ours(engine: ReferenceEngine, numbers: range, tokens: int, clock: Clock) -> Run:
    clock.seconds.update(model=0.0, step=0.0)
    begun = time.process_time()
    found = await asyncio.gather(*(one(engine, number, tokens) for number in numbers))
    cpu = time.process_time() - begun
    model, step = clock.seconds["model"], clock.seconds["step"]
    shares = tuple(part / cpu for part in (model, step - model, cpu - step))
    return Run(cpu, max(first for first, _ in found), shares, tuple(answer for _, answer in found))


class TorchModel:
    """The same decoder in torch, as fast as its operators make it without more machinery."""

    def __init__(self, model: TransformerModel, length: int, batch: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.config = torch, model.config
        as_tensor = torch.from_numpy
        weights = model.weights
        self.embedding, self.head = as_tensor(weights.embedding), as_tensor(weights.head)
        self.norm = as_tensor(weights.final_norm)
        names = ("input_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
        self.layers = [[as_tensor(getattr(layer, name)) for name in names] for layer in weights.layers]
        c = self.config
        self.cache = torch.zeros(2, c.layers, batch, c.kv_heads, length, c.head_dim)
        angles = torch.outer(torch.arange(length), as_tensor(model._frequencies))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Any, start: int) -> Any:
        """The logits behind the last of `tokens` (batch, count), which stand at `start` and after."""
        torch, functional, c = self.torch, self.torch.nn.functional, self.config
        batch, count = tokens.shape
        end = start + count
        cos, sin = self.cos[start:end], self.sin[start:end]

        def rotated(x: Any) -> Any:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        x = self.embedding[tokens]
        for number, (input_norm, qkv, output, mlp_norm, gate_up, down) in enumerate(self.layers):
            h = functional.linear(functional.rms_norm(x, (c.hidden_size,), input_norm, c.norm_eps), qkv)
            h = h.view(batch, count, c.heads + 2 * c.kv_heads, c.head_dim).transpose(1, 2)
            q, k, v = h.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
            keys, values = self.cache[0, number, :batch, :, :end], self.cache[1, number, :batch, :, :end]
            keys[:, :, start:], values[:, :, start:] = rotated(k), v
            mixed = functional.scaled_dot_product_attention(
                rotated(q), keys, values, is_causal=count > 1, enable_gqa=c.heads != c.kv_heads
            )
            x = x + functional.linear(mixed.transpose(1, 2).reshape(batch, count, -1), output)
            gate, up = functional.linear(functional.rms_norm(x, (c.hidden_size,), mlp_norm, c.norm_eps), gate_up).chunk(
                2, dim=-1
            )
            x = x + functional.linear(functional.silu(gate) * up, down)
        last = functional.rms_norm(x[:, -1], (c.hidden_size,), self.norm, c.norm_eps)
        return functional.linear(last, self.head)

    def run(self, numbers: range, tokens: int) -> Run:
        torch = self.torch
        begun = time.process_time()
        with torch.inference_mode():
            inputs = torch.tensor([prompt(number) for number in numbers])
            start, answers = 0, []
            for _ in range(tokens):
                best = self.forward(inputs, start).argmax(dim=-1, keepdim=True)
                start += inputs.shape[1]
                answers.append(best)
                inputs = best
            found = torch.cat(answers, dim=1).tolist()
        return Run(time.process_time() - begun, answers=tuple(tuple(answer) for answer in found))


def torch_model(model: TransformerModel, tokens: int) -> TorchModel | None:
    try:
        return TorchModel(model, PROMPT_TOKENS + tokens, max(BATCHES))
    except ImportError:
        print("torch is not installed, so there is nothing to compare with (extra: engines)")
        return None


async def measure(directory: Path, tokens: int, repeats: int, clock: Clock) -> None:
    engine = ReferenceEngine(directory, Options(prefix_caching=True))
    await engine.start(0)
    try:
        assert engine._steps is not None
        theirs = torch_model(engine._steps._core.model, tokens)
        await one(engine, 99, 20)  # warm
        if theirs is not None:
            theirs.run(range(2), 20)
        print("batch  tokens/s  CPU us/token   model  engine    loop  first token ms  torch tokens/s  ours/torch  same")
        for batch in BATCHES:
            runs: list[tuple[Run, Run | None]] = []
            for repeat in range(repeats):
                numbers = range(batch * 1000 + repeat * 100, batch * 1000 + repeat * 100 + batch)
                mine = await ours(engine, numbers, tokens, clock)
                runs.append((mine, None if theirs is None else theirs.run(numbers, tokens)))
            report(batch, tokens, runs)
    finally:
        await engine.cleanup()


def report(batch: int, tokens: int, runs: list[tuple[Run, Run | None]]) -> None:
    total = batch * tokens
    cpu = statistics.median(mine.cpu_s for mine, _ in runs)
    shares = [statistics.median(mine.shares[n] for mine, _ in runs) for n in range(3)]
    line = f"{batch:5}  {total / cpu:8.0f}  {cpu / total * 1e6:12.0f}" + "".join(f"  {share:6.1%}" for share in shares)
    line += f"  {statistics.median(mine.first_s for mine, _ in runs) * 1e3:14.1f}"
    pairs = [(mine, other) for mine, other in runs if other is not None]
    if pairs:
        rival = statistics.median(other.cpu_s for _, other in pairs)
        ratio = statistics.median(other.cpu_s / mine.cpu_s for mine, other in pairs)
        answers = [pair for mine, other in pairs for pair in zip(mine.answers, other.answers, strict=True)]
        same = sum(a == b for a, b in answers)
        line += f"  {total / rival:14.0f}  {ratio:9.2f}x  {same}/{len(answers)}"
    print(line)


def report_worker(batch: int, runs: list[Served]) -> None:
    share = statistics.median(1 - run.engine_s / run.total_s for run in runs)
    cost = statistics.median((run.total_s - run.engine_s) / run.tokens for run in runs)
    print(
        f"a worker process, batch {batch}: the framework's share of its CPU is {share:.1%}, {cost * 1e6:.0f} us/token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=200, help="per request")
    parser.add_argument("--repeats", type=int, default=5, help="of every batch, in turn with torch")
    args = parser.parse_args()
    clock = Clock()
    TransformerModel.forward = clock.timed("model", TransformerModel.forward)  # type: ignore[method-assign]
    TransformerModel.logits = clock.timed("model", TransformerModel.logits)  # type: ignore[method-assign]
    Core.step = clock.timed("step", Core.step)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        size = write_model(Path(directory), hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary)
        print(f"{size / 1e6:.1f} M parameters, hidden {args.hidden}, {args.layers} layers, one thread each, float32")
        asyncio.run(measure(Path(directory), args.tokens, args.repeats, clock))
        write_tokenizer(Path(directory))
        for batch in BATCHES:
            report_worker(batch, serve(Path(directory), [prompt(n) for n in range(batch)], args.tokens, args.repeats))


if __name__ == "__main__":
    main()
