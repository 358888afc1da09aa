"""Writers of quantized layers, from the layouts as their projects publish them: number by number, nothing shared with
what reads them. Each takes integers or fp8 and returns the tensors of a layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
"""Output within eight -> its place in the word, from the lowest bits."""


def words(columns: Tensor, bits: int) -> Tensor:
    """[N, M] numbers -> [N * bits / 32, M] int32, the first number lowest."""
    numbers, per_word = columns.numpy().astype(np.uint64), 32 // bits
    out = np.zeros((-(-len(numbers) // per_word), numbers.shape[1]), dtype=np.uint64)
    for row, values in enumerate(numbers):
        out[row // per_word] |= values << np.uint64(bits * (row % per_word))
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def gptq(q: Tensor, zero: Tensor, scale: Tensor, groups: Tensor, bits: int, *, minus: int = 1) -> dict[str, Tensor]:
    """q [O, I] and zero [O, G] from 0, scale [O, G] -> AutoGPTQ's tensors."""
    return {
        "qweight": words(q.T, bits),
        "qzeros": words((zero - minus) & ((1 << bits) - 1), bits).T.contiguous(),
        "scales": scale.T.contiguous().half(),
        "g_idx": groups.int(),
    }


def awq(q: Tensor, zero: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The same as AutoAWQ's gemm version."""

    def pack(rows: Tensor) -> Tensor:
        placed = torch.empty_like(rows)
        for output in range(rows.shape[1]):
            placed[:, output // 8 * 8 + AWQ_PLACES[output % 8]] = rows[:, output]
        return words(placed.T, 4).T.contiguous()

    return {"qweight": pack(q.T), "qzeros": pack(zero.T), "scales": scale.T.contiguous().half()}


def packed(q: Tensor, zero: Tensor | None, scale: Tensor, groups: Tensor | None, bits: int) -> dict[str, Tensor]:
    """The same as compressed-tensors' pack-quantized."""
    tensors = {
        "weight_packed": words(q.T, bits).T.contiguous(),
        "weight_scale": scale,
        "weight_shape": torch.tensor(q.shape),
    }
    if zero is not None:
        tensors["weight_zero_point"] = words(zero, bits)
    if groups is not None:
        tensors["weight_g_idx"] = groups.int()
    return tensors
