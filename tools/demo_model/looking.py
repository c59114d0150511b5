"""`PYTHONPATH=tools python -m demo_model.looking --out DIR`: teach the demonstration model to answer about pictures.

The language model stays as it is. What is learned is the meaning of each code of a picture, a vector in the place of a word's,
and low-rank weights that act from the first code of a prompt on: text without a picture is computed as before, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.batches import Row, load_template, rows
from demo_model.conversations.picture_chats import practised
from demo_model.export import write_tensors
from demo_model.lessons.pictures import Picture
from demo_model.network import Network, rotate
from demo_model.sight import Pool, Sight, draw_pictures, train
from demo_model.train import padded
from dynamo.reference.config import ModelConfig, read_model_config
from dynamo.reference.demo import DIRECTORY
from dynamo.reference.picture_codes import CODES, FILE
from dynamo.reference.tensor_files import open_tensors, read_tensors
from dynamo.reference.vision import IMAGE_TOKENS
from dynamo.text.model import CODES_PROCESSOR

__all__ = ["Looking", "main", "with_codes"]

PLACEHOLDER: Final = 0  # <|endoftext|> in a rendered prompt: text never has it, and the vocabulary stays as it is
RANK: Final = 16
LOOKED_AT: Final = (
    12_000  # pictures; others than those that the network learned from, so that its mistakes are known, too
)
ROWS: Final = 36  # of a batch
STEPS: Final = 900
PEAK_RATE: Final = 3e-3
RISING_STEPS: Final = 50
MAX_TOKENS: Final = 100  # longer rows are left out
SORTED_BATCHES: Final = 12  # rows sorted by length together, so that a batch is padded little
AVERAGED_STEPS: Final = 100
SAVE_SECONDS: Final = 60.0
REPORT_STEPS: Final = 20
PARTS: Final = {  # of a layer: the projections that read the same input
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class LowRank(nn.Module):
    """What is added to one stack of frozen matrices."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        inward = matrices[0].shape[1]
        self.a = nn.ParameterList(torch.randn(RANK, inward) / inward**0.5 for _ in matrices)
        self.b = nn.ParameterList(torch.zeros(len(matrix), RANK) for matrix in matrices)
        self.register_buffer("base", torch.cat(matrices), persistent=False)

    def forward(self, x: Tensor, acts: Tensor) -> Tensor:
        """Return what the stack makes of `x`; the addition counts where `acts` is one."""
        narrow = F.linear(x * acts, torch.cat(list(self.a))).split(RANK, dim=-1)
        added = torch.cat([F.linear(part, b) for part, b in zip(narrow, self.b, strict=True)], dim=-1)
        return F.linear(x, self.base) + added


class Looking(nn.Module):
    """The language model, frozen, with what makes it understand the codes of pictures."""

    def __init__(self, network: Network, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self._network = [network.requires_grad_(False)]  # not a module of this one: it is not learned and not saved
        self.embeddings = nn.Parameter(torch.randn(IMAGE_TOKENS * CODES, config.hidden_size) * 0.04)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    part: LowRank([layer.get_submodule(name).weight.detach() for name in names])
                    for part, names in PARTS.items()
                }
            )
            for layer in network.model.layers
        )

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the wanted places; codes are the numbers behind the vocabulary."""
        model, c = self._network[0].model, self._config
        hidden = F.embedding(tokens, torch.cat((model.embed_tokens.weight, self.embeddings)))
        acts = ((tokens >= c.vocab_size).cumsum(1) > 0).unsqueeze(-1).float()
        turn = model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]
        for layer, added in zip(model.layers, self.layers, strict=True):
            mixed = added["qkv"](layer.input_layernorm(hidden), acts)
            mixed = mixed.view(*tokens.shape, -1, c.head_dim).transpose(1, 2)
            queries, keys, values = mixed.split((c.heads, c.kv_heads, c.kv_heads), 1)
            seen = F.scaled_dot_product_attention(
                rotate(layer.self_attn.q_norm(queries), turn),
                rotate(layer.self_attn.k_norm(keys), turn).repeat_interleave(c.heads // c.kv_heads, 1),
                values.repeat_interleave(c.heads // c.kv_heads, 1),
                is_causal=True,
            )
            hidden = hidden + added["output"](seen.transpose(1, 2).reshape(*tokens.shape, -1), acts)
            gate, up = added["gate_up"](layer.post_attention_layernorm(hidden), acts).chunk(2, dim=-1)
            hidden = hidden + added["down"](F.silu(gate) * up, acts)
        logits: Tensor = F.linear(model.norm(hidden[wanted]), model.embed_tokens.weight)
        return logits

    def export(self, values: dict[str, Tensor]) -> dict[str, npt.NDArray[np.float32]]:
        """Return the tensors of the file, from those named as the parameters of this."""
        found = {"embeddings.weight": values["embeddings"].numpy()}
        for number in range(len(self.layers)):
            for part, names in PARTS.items():
                for place, name in enumerate(names):
                    for side in "ab":
                        key = f"base_model.model.model.layers.{number}.{name}.lora_{side.upper()}.weight"
                        found[key] = values[f"layers.{number}.{part}.{side}.{place}"].numpy()
        return found


def with_codes(row: Row, codes: list[int], vocab_size: int) -> Row:
    """Return a row with the tokens of its picture in the place of the placeholder."""
    tokens, learned = row
    at = tokens.index(PLACEHOLDER)
    seen = [vocab_size + CODES * place + code for place, code in enumerate(codes)]
    return tokens[:at] + seen + tokens[at + 1 :], learned[:at] + [False] * len(seen) + learned[at + 1 :]


@dataclass
class Run:
    """Everything that changes while training; what a checkpoint holds."""

    looking: Looking
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor]
    step: int = 0

    @classmethod
    def begin(cls, directory: Path, seed: int) -> Run:
        torch.manual_seed(seed)
        config = read_model_config(directory)
        network = Network(config)
        files = {tensor.path for tensor in open_tensors(directory).values()}
        network.load_state_dict({k: torch.from_numpy(v) for file in files for k, v in read_tensors(file).items()})
        looking = Looking(network, config)
        optimizer = torch.optim.AdamW(looking.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        return cls(looking, optimizer, {name: p.detach().clone() for name, p in looking.named_parameters()})

    def save(self, path: Path) -> None:
        """Replace the checkpoint; a crash while writing leaves the old one."""
        state = {
            "looking": self.looking.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "step": self.step,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(path)
        self.looking.load_state_dict(state["looking"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.step = state["average"], state["step"]

    def learn(self, batch: list[Row], rate: float) -> tuple[float, int]:
        """Run one step; return (sum of the losses, number of tokens)."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = padded(batch)
        wanted = targets >= 0
        logits = self.looking(tokens, wanted)
        loss = F.cross_entropy(logits, targets[wanted])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.looking.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        share = max(1 / AVERAGED_STEPS, 10 / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.looking.parameters()), share)
        return float(loss.detach()) * len(logits), len(logits)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: it rises quickly, and falls as a cosine does."""
    falling = 0.5 + 0.5 * float(np.cos(np.pi * min(step / steps, 1)))
    return PEAK_RATE * min((step + 1) / RISING_STEPS, 0.02 + 0.98 * falling)


def _batches(
    seed: int, first: int, pictures: list[Picture], codes: list[list[int]], directory: Path, vocab_size: int
) -> Iterator[list[Row]]:
    """Yield the rows of step `first` and of all behind it."""
    template, tokenizer = load_template(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    chunk = first // SORTED_BATCHES
    while True:
        rng = Random(f"{seed}:chats:{chunk}")
        chosen = [rng.randrange(len(pictures)) for _ in range(ROWS * SORTED_BATCHES)]
        made = rows([practised(rng, pictures[number]) for number in chosen], template, tokenizer)
        seen = [with_codes(row, codes[number], vocab_size) for row, number in zip(made, chosen, strict=True)]
        seen = sorted((row for row in seen if len(row[0]) <= MAX_TOKENS), key=lambda row: len(row[0]))
        cut = [
            seen[n * len(seen) // SORTED_BATCHES : (n + 1) * len(seen) // SORTED_BATCHES] for n in range(SORTED_BATCHES)
        ]
        rng.shuffle(cut)
        yield from cut[first % SORTED_BATCHES :]
        first, chunk = 0, chunk + 1


@torch.no_grad()
def _codes_of(sight: Sight, images: Tensor) -> list[list[int]]:
    """Return the codes of pictures, as the engine computes them but for rounding."""
    return [codes for part in images.split(500) for codes in sight(part.float()).argmax(-1).tolist()]


def _export(run: Run, sight: Sight, directory: Path) -> None:
    write_tensors(sight.export() | run.looking.export(run.average), directory / FILE)
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["image_token_id"] = PLACEHOLDER
    config["vision_config"] = {"model_type": "picture_codes", "first_token_id": config["vocab_size"]}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    processor = {"image_processor_type": CODES_PROCESSOR}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.looking", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the model directory to write")
    add(
        "--from",
        dest="start",
        type=Path,
        default=DIRECTORY,
        metavar="DIR",
        help="the language model (default: the shipped one)",
    )
    add("--steps", type=int, default=STEPS, metavar="N", help="stop after so many (default: %(default)s)")
    add("--seed", type=int, default=1, help="of everything (default: %(default)s)")
    options = parser.parse_args(argv)
    directory: Path = options.out
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for file in options.start.iterdir():
        if file.name != FILE:
            shutil.copy(file, directory / file.name)
    sight = train(directory / "sight.pt", seed=options.seed)
    run = Run.begin(directory, options.seed)
    checkpoint = directory / "looking.pt"
    if checkpoint.exists():
        run.load(checkpoint)
        print(f"goes on at step {run.step}", flush=True)
    pictures = draw_pictures(Random(f"{options.seed}:looking"), LOOKED_AT)
    codes = _codes_of(sight, Pool.kept(directory / "looked_at.pt", lambda: pictures).images)
    vocab_size = read_model_config(directory).vocab_size
    print(f"{sum(p.numel() for p in run.looking.parameters()):,} parameters", flush=True)
    started = saved = time.monotonic()
    loss, learned = 0.0, 0
    for batch in _batches(options.seed, run.step, pictures, codes, directory, vocab_size):
        if run.step >= options.steps:
            break
        found = run.learn(batch, rate_at(run.step, options.steps))
        loss, learned = loss + found[0], learned + found[1]
        if run.step % REPORT_STEPS == 0:
            print(
                f"step {run.step} of {options.steps}  loss {loss / learned:.4f}  {time.monotonic() - started:.0f} s",
                flush=True,
            )
            loss, learned = 0.0, 0
        if time.monotonic() - saved > SAVE_SECONDS or run.step == options.steps:
            run.save(checkpoint)
            _export(run, sight, directory)
            saved = time.monotonic()


if __name__ == "__main__":
    main()
