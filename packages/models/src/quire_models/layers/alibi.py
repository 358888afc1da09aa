"""Slopes of attention with linear biases (ALiBi, Press et al. 2022, sec. 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_models.mixer_spec import AlibiSpec

__all__ = ["alibi_slopes", "bloom_slopes", "mpt_slopes"]


def alibi_slopes(spec: AlibiSpec, num_heads: int) -> Tensor:
    """[num_heads] float32: by how much a score falls for each token in between."""
    slopes = bloom_slopes(num_heads) if spec.kind == "bloom" else mpt_slopes(num_heads, spec.bias_max)
    slopes = slopes.bfloat16().float() if spec.is_bfloat16 else slopes
    return slopes if spec.factor == 1.0 else slopes * spec.factor


def bloom_slopes(num_heads: int) -> Tensor:
    """[num_heads] float32: 2^(-8/n), 2^(-16/n), ... for n heads, the largest power of two that there is room for; the
    others take every second slope of twice as many heads."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = _powers(whole, 8.0)
    return torch.cat((slopes, _powers(2 * whole, 8.0)[0 : 2 * (num_heads - whole) : 2]))


def mpt_slopes(num_heads: int, bias_max: float = 8.0) -> Tensor:
    """[num_heads] float32: the slopes of the next power of two, first every second one from the second."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = _powers(whole, bias_max)
    return slopes if whole == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def _powers(num_heads: int, bias_max: float) -> Tensor:
    return 2.0 ** -(torch.arange(1, num_heads + 1, dtype=torch.float32) * (bias_max / num_heads))
