"""`PYTHONPATH=tools python -m demo_model.sight --out DIR`: teach the network that turns a picture into codes.

It learns on its own, without the language model: what the codes keep of a picture must be enough to say what is in it. They are
chosen while it learns, too, and the gradient passes by the choice as if the scores themselves were read.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.lessons.pictures import MANY, VARIANTS, Picture, picture
from demo_model.lessons.question import is_held_out
from dynamo.reference.demo.draw import SHAPES
from dynamo.reference.picture_codes import CODES, CONVOLUTIONS, HIDDEN, SIDE, scaled
from dynamo.reference.vision import IMAGE_TOKENS

__all__ = ["Sight", "draw_pictures", "facts_of"]

KINDS: Final = ("blank", "dots", "shapes", "digit", "other")
NAMES: Final = tuple(VARIANTS)
FACTS: Final = {  # what the codes must tell, and how many answers there are
    "kind": len(KINDS),
    "dots": MANY + 1,
    "colour": len(NAMES) + 1,  # the last: several
    "digit": 10,
    **{shape: len(NAMES) + 1 for shape in SHAPES},  # its colour; the last: there is none
}
UNASKED: Final = -1
POOL: Final = 42_000  # pictures that are drawn; they come turned and mirrored, where that changes no answer
BATCH: Final = 64
STEPS: Final = 13_000
PEAK_RATE: Final = 2e-3
RISING_STEPS: Final = 100
WIDTH: Final = 96  # of what reads the codes
SAVE_SECONDS: Final = 60.0
REPORT_STEPS: Final = 100


class Sight(nn.Module):
    """The network of `dynamo.reference.picture_codes`, with norms that are put into the matrices when it is exported."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, *CONVOLUTIONS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, behind, 3, stride=2, padding=1, bias=False) for before, behind in pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(count) for count in CONVOLUTIONS)
        side = SIDE >> len(CONVOLUTIONS)
        self.hidden = nn.Linear(side * side * CONVOLUTIONS[-1] + sum(CONVOLUTIONS[:-1]), HIDDEN, bias=False)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.codes = nn.Linear(HIDDEN, IMAGE_TOKENS * CODES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores, (images, tokens, codes), of scaled images (images, side, side, 3)."""
        x = images.permute(0, 3, 1, 2) / 255 - 0.5
        sums = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
            sums.append(x.sum(dim=(2, 3)) / x.shape[-1])
        flat = torch.cat((x.permute(0, 2, 3, 1).flatten(1), *sums[:-1]), dim=1)
        found: Tensor = self.codes(F.relu(self.norm(self.hidden(flat))))
        return found.view(-1, IMAGE_TOKENS, CODES)

    @torch.no_grad()
    def export(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the tensors of the file: the channels of a convolution come last there."""
        found = {"codes.weight": self.codes.weight, "codes.bias": self.codes.bias}
        pairs = [(f"convolutions.{n}", *pair) for n, pair in enumerate(zip(self.convolutions, self.norms, strict=True))]
        for name, layer, norm in (*pairs, ("hidden", self.hidden, self.norm)):
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            weight = layer.weight * scale.view(-1, *[1] * (layer.weight.dim() - 1))
            found[f"{name}.weight"] = weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight
            found[f"{name}.bias"] = norm.bias - norm.running_mean * scale
        return {name: values.detach().contiguous().numpy() for name, values in found.items()}


class Reader(nn.Module):
    """Says what is in a picture by its codes alone; thrown away behind training."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(IMAGE_TOKENS * CODES, WIDTH)
        self.answers = nn.ModuleDict({name: nn.Linear(WIDTH, count) for name, count in FACTS.items()})

    def forward(self, chosen: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.words(chosen.flatten(1)))
        return {name: answer(hidden) for name, answer in self.answers.items()}


def draw_pictures(rng: Random, count: int, *, held_out: bool = False) -> list[Picture]:
    """Return pictures of one side of the split."""
    found: list[Picture] = []
    while len(found) < count:
        made = picture(rng)
        if is_held_out(f"picture {made.key}") == held_out:
            found.append(made)
    return found


def facts_of(shown: Picture) -> list[int]:
    """Return the right answer to each of `FACTS`; UNASKED where there is none."""
    colours = dict(shown.shapes)
    colour = UNASKED
    if shown.kind in ("dots", "digit"):
        colour = len(NAMES) if shown.colour is None else NAMES.index(shown.colour)
    return [
        KINDS.index(shown.kind),
        shown.dots if shown.kind in ("dots", "blank") else UNASKED,
        colour,
        UNASKED if shown.digit is None else shown.digit,
        *(
            (NAMES.index(colours[shape]) if shape in colours else len(NAMES)) if shown.kind == "shapes" else UNASKED
            for shape in SHAPES
        ),
    ]


@dataclass(frozen=True, slots=True)
class Pool:
    """Pictures as the network gets them, and their facts."""

    images: Tensor  # (pictures, side, side, 3), bytes
    facts: Tensor

    @classmethod
    def of(cls, pictures: list[Picture]) -> Pool:
        images = np.stack([np.rint(scaled(shown.pixels())).astype(np.uint8) for shown in pictures])
        return cls(torch.from_numpy(images), torch.tensor([facts_of(shown) for shown in pictures]))

    @classmethod
    def kept(cls, path: Path, pictures: Callable[[], list[Picture]]) -> Pool:
        """Return the pool of the file; where there is none, that of the pictures, and keep it there."""
        if path.exists():
            found = torch.load(path)
            return cls(found["images"], found["facts"])
        pool = cls.of(pictures())
        torch.save({"images": pool.images, "facts": pool.facts}, path)
        return pool

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return the images and facts of one step: each picture once before any comes again."""
        batches = len(self.images) // BATCH
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed + step // batches))
        chosen = order[step % batches * BATCH :][:BATCH]
        images, facts = self.images[chosen].float(), self.facts[chosen]
        rng = Random(f"{seed}:turned:{step}")
        for number, kind in enumerate(facts[:, 0].tolist()):
            axes = {"dots": (0, 1), "other": (0, 1), "shapes": (1,)}.get(KINDS[kind], ())
            if flipped := [axis for axis in axes if rng.random() < 0.5]:
                images[number] = images[number].flip(flipped)
            if len(axes) == 2 and rng.random() < 0.5:
                images[number] = images[number].transpose(0, 1).clone()
        return images, facts


@dataclass
class Run:
    """Everything that changes while training; what a checkpoint holds."""

    sight: Sight
    reader: Reader
    optimizer: torch.optim.Optimizer
    step: int = 0

    @classmethod
    def begin(cls, seed: int) -> Run:
        torch.manual_seed(seed)
        sight, reader = Sight(), Reader()
        parameters = [*sight.parameters(), *reader.parameters()]
        return cls(sight, reader, torch.optim.AdamW(parameters, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01))

    def save(self, path: Path) -> None:
        """Replace the checkpoint; a crash while writing leaves the old one."""
        state = {
            "sight": self.sight.state_dict(),
            "reader": self.reader.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(path)
        self.sight.load_state_dict(state["sight"])
        self.reader.load_state_dict(state["reader"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def learn(self, images: Tensor, facts: Tensor, rate: float) -> float:
        """Run one step; return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        shares = F.softmax(self.sight(images), dim=-1)
        chosen = F.one_hot(shares.argmax(-1), CODES).float()
        answers = self.reader(chosen + shares - shares.detach())
        loss = torch.stack(
            [
                F.cross_entropy(answer, facts[:, number], ignore_index=UNASKED, reduction="sum") / len(images)
                for number, answer in enumerate(answers.values())
            ]
        ).sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*self.sight.parameters(), *self.reader.parameters()], 1.0)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def right(self, images: Tensor, facts: Tensor) -> dict[str, float]:
        """Return how often each fact is told by the most likely codes."""
        self.sight.eval()
        chosen = F.one_hot(self.sight(images).argmax(-1), CODES).float()
        self.sight.train()
        found = {}
        for number, (name, answer) in enumerate(self.reader(chosen).items()):
            asked = facts[:, number] != UNASKED
            found[name] = float((answer.argmax(-1) == facts[:, number])[asked].float().mean())
        return found


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: it rises quickly, and falls as a cosine does."""
    falling = 0.5 + 0.5 * float(np.cos(np.pi * min(step / steps, 1)))
    return PEAK_RATE * min((step + 1) / RISING_STEPS, 0.02 + 0.98 * falling)


def train(path: Path, *, seed: int, steps: int = STEPS) -> Sight:
    """Return the trained network; `path` holds its checkpoint."""
    torch.set_num_threads(1)
    run = Run.begin(seed)
    if path.exists():
        run.load(path)
        print(f"goes on at step {run.step}", flush=True)
    examined = Pool.of(draw_pictures(Random(f"{seed}:choices"), 600, held_out=True))
    pool = Pool.kept(path.with_name("pictures.pt"), lambda: draw_pictures(Random(f"{seed}:sight"), POOL))
    print(f"{len(pool.images)} pictures are drawn", flush=True)
    started = saved = time.monotonic()
    total = 0.0
    while run.step < steps:
        total += run.learn(*pool.batch(seed, run.step), rate_at(run.step, steps))
        if run.step % REPORT_STEPS == 0:
            told = "  ".join(
                f"{name} {share:.1%}" for name, share in run.right(examined.images.float(), examined.facts).items()
            )
            print(
                f"step {run.step} of {steps}  loss {total / REPORT_STEPS:.4f}  {told}  {time.monotonic() - started:.0f} s",
                flush=True,
            )
            total = 0.0
        if time.monotonic() - saved > SAVE_SECONDS or run.step == steps:
            run.save(path)
            saved = time.monotonic()
    run.sight.eval()
    return run.sight


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.sight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the checkpoint is kept")
    add("--steps", type=int, default=STEPS, metavar="N", help="stop after so many (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the weights and of the pictures (default: %(default)s)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.out / "sight.pt", seed=options.seed, steps=options.steps)


if __name__ == "__main__":
    main()
