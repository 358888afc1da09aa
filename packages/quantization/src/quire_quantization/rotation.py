"""Hadamard rotations of tokens while a network runs, as QuaRot (Ashkboos et al. 2024) has them around its layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["hadamard_matrix", "hadamard_rotated"]


def hadamard_rotated(x: Tensor, size: int) -> Tensor:
    """x [N, features] times Sylvester's Hadamard matrix of `size` divided by its root, each `size` features by
    themselves; in float32, then of x's dtype. A row depends on nothing but itself. size: a power of 2 that divides the
    features."""
    rotated = x.float().reshape(-1, size)
    step = 1
    while step < size:  # the fast Walsh-Hadamard transform: sums and differences of neighbours, then of pairs, ...
        first, second = rotated.view(-1, size // (2 * step), 2, step).unbind(2)
        rotated = torch.stack((first + second, first - second), dim=2)
        step *= 2
    return (rotated.reshape(x.shape) / math.sqrt(size)).to(x.dtype)


def hadamard_matrix(size: int) -> Tensor:
    """[size, size] of 1 and -1, float32."""
    return (hadamard_rotated(torch.eye(size), size) * math.sqrt(size)).round()
