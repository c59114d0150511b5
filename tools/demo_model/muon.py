"""Muon: steps of equal size in every direction of a weight matrix, which learns from fewer tokens than AdamW here.

PyTorch has one, but it orthogonalizes in bfloat16, which CPUs without such instructions do many times more slowly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Muon"]

ITERATIONS: Final = 5
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of the polynomial that takes singular values near one


class Muon(torch.optim.Optimizer):
    """For matrices only. The rate is that of AdamW for the same layer: updates are scaled to the size of its updates."""

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Change every matrix that has a gradient."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("momentum", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(average, group["momentum"])
                rows, columns = sorted(update.shape)
                alike[rows, columns].append((matrix, update if update.shape[0] == rows else update.T))
            for (_, columns), pairs in alike.items():
                turned = orthogonal(torch.stack([update for _, update in pairs]))
                for (matrix, _), update in zip(pairs, turned, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    same = update if update.shape == matrix.shape else update.T
                    matrix.add_(same, alpha=-group["lr"] * 0.2 * columns**0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with equal singular values, roughly; (many, rows, columns), rows <= columns."""
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return x
