"""Tokens rounded to int8, as op `w8a8_linear` takes them. Knows this rule; does not know weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_tokens"]


def round_tokens(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of numbers -> whole numbers and what one of them stands for; computed in float32.

    Args:
        x: [N, I].
        input_scale: [1] float32, the step of every row; or 0, then each row has its own, its largest magnitude / 127.

    Returns:
        [N, I] int8: x / step, rounded to nearest even, from -128 to 127; zeros where the step is too small for its
        inverse. And the steps [N] float32: NaN for a row with something that is not finite.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    finite = largest < torch.inf
    if float(input_scale) > 0:
        step = input_scale.float().expand(len(x))
        inverse = 1.0 / step
    else:
        step, inverse = largest / 127.0, torch.full_like(largest, 127.0) / largest  # a number / tensor rounds twice
    inverse = torch.where(finite & (inverse < torch.inf), inverse, 0.0)
    # A row that is not finite has no numbers, whatever its products with zero are.
    rows = torch.where(finite[:, None], wide, 0.0)
    numbers = (rows * inverse[:, None]).round_().clamp_(-128, 127).to(torch.int8)
    return numbers, torch.where(finite, step, torch.nan)
