"""Weights in MXFP4, as gpt-oss is published: numbers of four bits, a power of two for each 32 of them.

The format is that of the OCP Microscaling specification 1.0 (sec. 5.3.3: E2M1 elements, E8M0 scales). Knows bytes and
their values; does not know which tensors have them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantize_mxfp4"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)))
"""What each four bits mean: a sign, two bits of exponent, one of mantissa."""
_SCALE_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Exact, but for results below what bfloat16 can hold.

    Args:
        blocks: [O, G, 16] uint8, two elements in a byte, the first in its lower half.
        scales: [O, G] uint8, exponents of two plus 127.

    Returns:
        [O, 32 * G] bfloat16.
    """
    elements = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # [O, G, 32]
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(_VALUES[elements.int()], exponents[:, :, None]).flatten(1).bfloat16()
