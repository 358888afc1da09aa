"""Muon (Jordan et al. 2024): steps of matrices, made orthogonal; it takes fewer of them than Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose direction is orthogonalized, for matrices that multiply.

    Args:
        params: Matrices [out, in]; everything else belongs to another optimizer.
        lr: Learning rate; a step's root mean square is about 0.2 of it, as Adam's (Liu et al. 2025).
        momentum: Share of the last direction that stays.
        weight_decay: Decoupled.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Change the matrices by their gradients; `closure` is not called."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose singular values are 1, by five Newton-Schulz steps of degree five."""
    x = matrix.float()
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if tall else x
