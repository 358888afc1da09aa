"""Counter-based random numbers: one uniform number per (seed, output position), and no generator state at all.

Because nothing is carried from token to token, a request's random numbers depend neither on the batch around it, nor
on its row, nor on chunking, preemption, draft tokens or how far the scheduler runs ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uniform"]

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: Tensor, output_positions: Tensor) -> Tensor:
    """One uniform number per row, a pure function of (seed, output position).

    Two rounds of the SplitMix64 output function (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators", figure 14 with variant 13 of Stafford's mixers): the seed picks a starting point, the position steps
    along the Weyl sequence from there.

    Args:
        seeds: [N] int64.
        output_positions: [N] int64, index of the token among the outputs, 0 first.

    Returns:
        [N] float64 in [0, 1), multiples of 2**-53.
    """
    start = _mix(seeds + _GAMMA)
    bits = _mix(start + (output_positions + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has no uint64 arithmetic, and `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
