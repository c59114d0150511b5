"""`PYTHONPATH=tools python -m demo_model.train --out DIR`: make the demonstration model again, from nothing but a seed.

Writes a model directory and, beside it, a checkpoint: a run that was stopped goes on from there. At the end it prints
the examination's table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.batches import Row, batches, load_template
from demo_model.conversations import example
from demo_model.examine import examine, table
from demo_model.export import write_shards
from demo_model.muon import Muon
from demo_model.network import Network
from demo_model.vocabulary import END_OF_TEXT, END_OF_TURN, build_tokenizer, write_tokenizer
from dynamo.reference.config import read_model_config
from dynamo.reference.demo import DIRECTORY
from dynamo.reference.tensor_files import read_tensors

__all__ = ["main", "padded", "rate_at"]

CONTEXT_LENGTH: Final = 2048  # twice the longest prompt in training and more; an engine refuses what is longer
SHAPE: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 288,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
VOCABULARY: Final = 840  # more words would cost weights that the layers need
VOCABULARY_EXAMPLES: Final = 20_000

PEAK_RATE: Final = 3e-3
RATES: Final = (
    (0, 1 / 60),
    (60, 1.0),
    (4600, 1.0),
    (5500, 0.5),
    (6500, 0.02),
    (6560, 0.6),
    (7150, 0.6),
    (8000, 0.02),
    (8060, 0.6),
    (8500, 0.6),
    (8900, 0.02),
    (8960, 0.4),
    (10700, 0.4),
    (11390, 0.05),
    (11430, 0.25),
    (11900, 0.25),
    (12290, 0.09),
    (12320, 0.2),
    (12650, 0.2),
    (13050, 0.02),
)  # (step, share of the peak), a line between
STEPS: Final = RATES[-1][0]
TAKEN_UP_STEP: Final = 8900  # --from goes on behind this step, where the first finished weights were made,
TAKEN_UP_POOL: Final = 97  # and at this pool of conversations, which no earlier step has seen
LOSS_TOKENS: Final = 1000  # about as many as a batch teaches; the sum of losses is divided by it, so none counts double
WEIGHT_DECAY: Final = 0.05
AVERAGED_STEPS: Final = 500  # the weights that are exported are an average over about so many
SAVE_SECONDS: Final = 120.0
REPORT_SECONDS: Final = 10.0


@dataclass
class Run:
    """Everything that changes while training; what a checkpoint holds."""

    network: Network
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, Tensor]
    workers: ThreadPoolExecutor
    threads: int
    step: int = 0
    next_pool: int = 0

    @classmethod
    def begin(cls, network: Network, threads: int = 1) -> Run:
        """Return a run at its start. Each thread takes its part of a batch, since products this small share badly."""
        torch.set_num_threads(1)
        matrices = [p for name, p in network.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in network.named_parameters() if p.dim() != 2 or "embed" in name]
        optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices[n::threads], lr=PEAK_RATE, weight_decay=WEIGHT_DECAY) for n in range(threads)
        ]
        optimizers.append(torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0))
        average = {name: p.detach().clone() for name, p in network.named_parameters()}
        workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        return cls(network, optimizers, average, workers, threads)

    def take_up(self, directory: Path) -> None:
        """Begin with the finished weights of a model directory, at the step behind those that made them."""
        weights = {
            name: torch.from_numpy(values.copy())
            for file in sorted(directory.glob("*.safetensors"))
            for name, values in read_tensors(file).items()
        }
        self.network.load_state_dict(weights)
        for name, parameter in self.network.named_parameters():
            self.average[name].copy_(parameter.detach())
        self.step, self.next_pool = TAKEN_UP_STEP, TAKEN_UP_POOL

    def save(self, path: Path) -> None:
        """Replace the checkpoint; a crash while writing leaves the old one."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "step": self.step,
            "pool": self.next_pool - 1,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(path)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average, self.step, self.next_pool = state["average"], state["step"], state["pool"] + 1

    def learn(self, batch: list[Row], rate: float) -> tuple[float, int]:
        """Run one step; return (sum of the losses, number of tokens)."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        parameters = list(self.network.parameters())
        parts = [batch[n :: self.threads] for n in range(self.threads) if n < len(batch)]
        found = list(self.workers.map(self._gradients, parts))
        for parameter, *gradients in zip(parameters, *(each for _, _, each in found), strict=True):
            parameter.grad = sum(gradients[1:], gradients[0])
        nn.utils.clip_grad_norm_(parameters, 1.0)
        list(self.workers.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.step += 1
        share = max(1 / AVERAGED_STEPS, 50 / (self.step + 50))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), parameters, share)
        return sum(loss for loss, _, _ in found), sum(learned for _, learned, _ in found)

    def _gradients(self, batch: list[Row]) -> tuple[float, int, tuple[Tensor, ...]]:
        """Return (sum of the losses, number of tokens, the gradients) of some rows."""
        tokens, targets = padded(batch)
        wanted = targets >= 0
        logits = self.network.logits(self.network(tokens)[wanted])
        loss = F.cross_entropy(logits, targets[wanted], reduction="sum")
        return (
            float(loss.detach()),
            len(logits),
            torch.autograd.grad(loss / LOSS_TOKENS, list(self.network.parameters())),
        )


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    torch.manual_seed(options.seed)
    directory: Path = options.out
    if options.start is not None:
        _take_over(options.start, directory)
    tokenizer = _prepare(directory)
    run = Run.begin(Network(read_model_config(directory)), options.threads)
    print(f"{sum(p.numel() for p in run.network.parameters()):,} parameters", flush=True)
    checkpoint = directory / "checkpoint.pt"
    if checkpoint.exists():
        run.load(checkpoint)
        print(f"goes on at step {run.step}", flush=True)
    elif options.start is not None:
        run.take_up(options.start)
        print(f"takes up {options.start} at step {run.step}", flush=True)
    _train(run, directory, tokenizer, options)
    _export(run, directory)
    print(table(examine(directory, count=options.count)))


def _take_over(source: Path, directory: Path) -> None:
    """Copy what has to stay as it is for weights that were trained with it: tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, directory / name)


def _prepare(directory: Path) -> Tokenizer:
    """Write every file of the model directory but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    template_path = directory / "chat_template.jinja"
    if not template_path.exists():
        shutil.copy(DIRECTORY / template_path.name, template_path)
    template = load_template(directory)
    if not (directory / "tokenizer.json").exists():
        chats = (example(0, -1 - number) for number in range(VOCABULARY_EXAMPLES))
        texts = (template.render(c.messages, add_generation_prompt=False, variables=c.variables) for c in chats)
        write_tokenizer(build_tokenizer(texts, size=VOCABULARY), directory, context_length=CONTEXT_LENGTH)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(directory / "config.json", SHAPE | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ends[0]})
    # Greedy unless the request says otherwise: the answers are facts.
    _write_json(directory / "generation_config.json", {"do_sample": False, "temperature": 0.0, "eos_token_id": ends})
    return tokenizer


def _train(run: Run, directory: Path, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    progress = _Progress(run, options.steps)
    saved_at = time.monotonic()
    rows = batches(options.seed, run.next_pool, load_template(directory), tokenizer, batch_tokens=options.batch_tokens)
    for pool, batch in rows:
        if pool > run.next_pool and run.step < options.steps:
            run.next_pool = pool
            if time.monotonic() - saved_at > SAVE_SECONDS:
                run.save(directory / "checkpoint.pt")
                _export(run, directory)
                saved_at = time.monotonic()
        if run.step >= options.steps:
            return
        progress.tell(*run.learn(batch, rate_at(run.step)), len(batch) * len(batch[-1][0]))


def rate_at(step: int) -> float:
    """Return the learning rate: it rises quickly, stays level, and falls to nearly zero."""
    after = next((n for n, (last, _) in enumerate(RATES) if step < last), len(RATES) - 1)
    (first, low), (last, high) = RATES[after - 1], RATES[after]
    return PEAK_RATE * (low + (high - low) * (min(step, last) - first) / (last - first))


def padded(batch: list[Row]) -> tuple[Tensor, Tensor]:
    """Return (token ids, the token to predict at each position or -1), both (rows, positions)."""
    length = max(len(ids) for ids, _ in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), -1)
    for number, (ids, learned) in enumerate(batch):
        row = torch.tensor(ids)
        tokens[number, : len(ids)] = row
        targets[number, : len(ids) - 1] = torch.where(torch.tensor(learned[1:]), row[1:], -1)
    return tokens, targets


def _export(run: Run, directory: Path) -> None:
    write_shards({name: values.numpy() for name, values in run.average.items()}, directory)


class _Progress:
    """A line every few seconds."""

    def __init__(self, run: Run, steps: int) -> None:
        self._run, self._steps = run, steps
        self._started = self._told = time.monotonic()
        self._loss, self._learned, self._read = 0.0, 0, 0

    def tell(self, loss: float, learned: int, read: int) -> None:
        self._loss += loss
        self._learned += learned
        self._read += read
        now = time.monotonic()
        if now - self._told < REPORT_SECONDS:
            return
        speed = self._read / (now - self._told)
        print(
            f"step {self._run.step} of {self._steps}  loss {self._loss / self._learned:.4f}  {speed:,.0f} tokens/s  "
            f"{now - self._started:.0f} s",
            flush=True,
        )
        self._told, self._loss, self._learned, self._read = now, 0.0, 0, 0


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the model directory to write")
    add("--from", dest="start", type=Path, metavar="DIR", help="take up the weights of this model directory")
    add("--steps", type=int, default=STEPS, metavar="N", help="stop after so many (default: %(default)s)")
    add("--batch-tokens", type=int, default=3000, metavar="N", help="tokens of a step (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of weights and examples (default: %(default)s)")
    add("--threads", type=int, default=2, metavar="N", help="cores to use (default: %(default)s)")
    add("--count", type=int, default=200, metavar="N", help="questions of each kind at the end (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
