"""Inputs of linear layers that are rounded before the product: once, for every layer that takes the same ones.

Knows the two rules of rounding tokens (`int8_tokens.py`, `fp8_tokens.py`); does not know weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.fp8_tokens import round_tokens_to_fp8
from quire_ops.int8_tokens import round_tokens

__all__ = ["QuantizedTokens", "Rounding", "round_rows"]


class Rounding(NamedTuple):
    """What a product rounds its inputs to."""

    dtype: torch.dtype
    """int8, as op `w8a8_linear` takes them, or float8_e4m3fn, as op `fp8_linear` does."""
    input_scale: Tensor
    """[1] float32, the step of every row, or 0: see the two rules."""
    by_group: bool = False
    """Of fp8: each 128 inputs have a step of their own."""


class QuantizedTokens(NamedTuple):
    """Rows that are rounded already. The two ops take them in the place of x [N, I]."""

    tokens: Tensor
    """[N, I] int8 or float8_e4m3fn."""
    steps: Tensor
    """Of int8 [N], of fp8 [N, G] float32; G is ceil(I / 128) by group, else 1."""
    dtype: torch.dtype
    """What the rows were before, and what a product of them is."""


def round_rows(x: Tensor, rounding: Rounding) -> QuantizedTokens:
    """x [N, I] rounded."""
    if rounding.dtype == torch.int8:
        return QuantizedTokens(*round_tokens(x, rounding.input_scale), x.dtype)
    return QuantizedTokens(*round_tokens_to_fp8(x, rounding.input_scale, by_group=rounding.by_group), x.dtype)
