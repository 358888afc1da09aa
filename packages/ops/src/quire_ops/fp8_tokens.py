"""Tokens rounded to fp8 e4m3, as op `fp8_linear` takes them. Knows this rule; does not know weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FP8_GROUP", "FP8_MAX", "round_tokens_to_fp8"]

FP8_MAX = 448.0
"""Largest finite number of e4m3."""
FP8_GROUP = 128
"""Inputs of a group (DeepSeek-AI 2024, DeepSeek-V3, sec. 3.3.2)."""


def round_tokens_to_fp8(x: Tensor, input_scale: Tensor, *, by_group: bool) -> tuple[Tensor, Tensor]:
    """Rows of numbers -> numbers of e4m3 and what they are multiples of; computed in float32.

    Args:
        x: [N, I].
        input_scale: [1] float32, the step of every row; or 0, then steps are those of the numbers: their largest
            magnitude / 448.
        by_group: Each 128 inputs of a row have a step of their own, the last ones of a row where they are fewer, too;
            else all of a row have one.

    Returns:
        [N, I] float8_e4m3fn: x / step, at most 448, rounded to nearest even; zeros where the step is 0. And the steps
        [N, G] float32, G = ceil(I / 128) by group, else 1: NaN where something among the numbers is not finite.
    """
    rows, inputs = x.shape
    size = FP8_GROUP if by_group else max(1, inputs)
    groups = -(-inputs // size)
    wide = torch.nn.functional.pad(x.float(), (0, groups * size - inputs)).view(rows, groups, size)
    largest = wide.abs().amax(dim=2)
    finite = largest < torch.inf
    step = input_scale.float().expand(rows, groups) if float(input_scale) > 0 else largest / FP8_MAX
    usable = (finite & (step > 0))[..., None]
    scaled = torch.where(usable, wide, 0.0) / torch.where(usable, step[..., None], 1.0)
    numbers = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(rows, groups * size)[:, :inputs]
    return numbers.contiguous(), torch.where(finite, step, torch.nan)
