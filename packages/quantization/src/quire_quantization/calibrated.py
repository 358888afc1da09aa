"""Rounding that looks at a layer's inputs: GPTQ, and the factors of activation-aware scaling.

Knows matrices; does not know layers, files, or where inputs come from.

Shape legend: O outputs, I inputs, G groups of inputs, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["InverseFactor", "awq_factors", "gptq_round", "inverse_factor", "second_moments"]

_ROWS = 4096
_BLOCK = 128
_DAMPING = 0.01
_RATIOS = 20
_SAMPLE_TOKENS = 1024


class InverseFactor(NamedTuple):
    """What GPTQ needs of a layer's inputs."""

    order: Tensor
    """[I] int64: inputs, those with the largest mean square first."""
    upper: Tensor
    """[I, I] float32, upper triangular: `upper.T @ upper` is the inverse of the damped second moments in this order."""
    dead: Tensor
    """[I] bool, inputs as the network has them: always zero."""


def second_moments(x: Tensor) -> Tensor:
    """x [T, I] -> the mean of x x^T over tokens, [I, I] float32."""
    moments = torch.zeros(x.shape[1], x.shape[1])
    for begin in range(0, len(x), _ROWS):  # bounds the wide copies
        rows = x[begin : begin + _ROWS].float()
        moments.addmm_(rows.T, rows)
    return moments.div_(max(1, len(x)))


def inverse_factor(moments: Tensor) -> InverseFactor:
    """Second moments [I, I] of a layer's inputs -> their inverse's factor (Frantar et al. 2022, arXiv:2210.17323, sec.
    3.3, step 3: Cholesky), dampened by 1 % of the mean square; more where that is not enough. Overwrites `moments`."""
    diagonal = moments.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    order = torch.argsort(diagonal, descending=True, stable=True)
    ordered = moments[order][:, order]
    damping = _DAMPING * float(diagonal.mean())
    while True:
        ordered.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(ordered)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return InverseFactor(order, upper, dead)
        damping *= 10


def gptq_round(weight: Tensor, scale: Tensor, factor: InverseFactor, *, low: int, high: int) -> Tensor:
    """Round a weight input by input, and make up for each error in the inputs that are still to come (GPTQ, Frantar et
    al. 2022, arXiv:2210.17323, algorithm 1). The inputs with the largest mean square come first; groups and their
    scales are fixed before, so that a group's inputs stay side by side.

    Args:
        weight: [O, I] float.
        scale: [O, G] float, not zero where its group is not; I / G inputs share one.
        low, high: Least and largest element.

    Returns:
        [O, I] int8.
    """
    outputs, inputs = weight.shape
    # Inputs are rows here: one is rounded at a time.
    left = weight.float().T[factor.order].contiguous()
    left[factor.dead[factor.order]] = 0.0
    scales = scale.float().T[factor.order // (inputs // scale.shape[1])]
    divisors = torch.where(scales == 0, torch.inf, scales)
    rounded = torch.empty(inputs, outputs, dtype=torch.int8)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        block, upper = left[begin:end], factor.upper[begin:end]
        errors = torch.empty_like(block)
        for i in range(end - begin):
            nearest = (block[i] / divisors[begin + i]).round_().clamp_(low, high)
            rounded[begin + i] = nearest.to(torch.int8)
            errors[i] = (block[i] - nearest * scales[begin + i]) / upper[i, begin + i]
            block[i + 1 :].addr_(upper[i, begin + i + 1 : end], errors[i], alpha=-1.0)
        left[end:].addmm_(upper[:, end:].T, errors, alpha=-1.0)
    result = torch.empty(outputs, inputs, dtype=torch.int8)
    result[:, factor.order] = rounded.T
    return result


def awq_factors(
    x: Tensor,
    weights: Sequence[Tensor],
    rounded: Callable[[Tensor], Tensor],
    share: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """Factors that make the inputs which matter lose less when weights are rounded: a weight is rounded times the
    factor of its input, and the input divided by it (AWQ, Lin et al. 2023, arXiv:2306.00978, sec. 3.2). They are the
    inputs' mean magnitudes to the power of a ratio; of 20 ratios from 0 the one with the least squared error in the
    outputs is taken.

    Args:
        x: [T, I], the inputs of all `weights`.
        weights: [O, I] each.
        rounded: A weight -> what it is after rounding, [O, I] float.
        share: Mean magnitudes [I] -> the same, equal for inputs that have to share a factor.

    Returns:
        [I] float32, above zero.
    """
    magnitude = share(_mean_magnitude(x)).clamp_min_(1e-4)
    sample = x[:: -(-len(x) // _SAMPLE_TOKENS)].float()
    best, least = torch.ones_like(magnitude), torch.inf
    for ratio in (step / _RATIOS for step in range(_RATIOS)):
        factors = magnitude**ratio
        factors /= (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight in weights:
            difference = rounded((weight.float() * factors).to(weight.dtype)).div_(factors).sub_(weight.float())
            error += float((sample @ difference.T).square_().sum())
        if error < least:
            best, least = factors, error
    return best


def _mean_magnitude(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1])
    for begin in range(0, len(x), _ROWS):
        total += x[begin : begin + _ROWS].float().abs().sum(dim=0)
    return total.div_(max(1, len(x)))
