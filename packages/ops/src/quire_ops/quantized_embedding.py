"""Rows of a table of embeddings that is kept in one of the forms of a quantized weight.

Shape legend: T tokens, V rows of the table, H width of a row, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.block_formats import decode_blocks
from quire_ops.grouped import dequantize, group_size_of, unpacked_rows
from quire_ops.linear_weights import LinearWeights, is_in_blocks
from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["quantized_embedding"]


@op
def quantized_embedding(ids: Tensor, weights: LinearWeights, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of a quantized table, dequantized and rounded to `dtype`: op `embedding` with the table as it is kept.

    ids [T] int64, weights a table [V, size] in any form that `LinearWeights` names -> [T, size] of `dtype`."""
    if weights.scale is None:
        table = weights.weight
    elif is_in_blocks(weights):
        table = decode_blocks(weights.weight, weights.scale)
    elif weights.scale.ndim == 1:
        table = weights.weight * weights.scale.float()[:, None]
    else:
        table = dequantize(weights.weight, weights.scale, weights.zero, size, torch.float32)
    return table[ids].to(dtype)


@torch_backend_for(quantized_embedding)
def torch_quantized_embedding(ids: Tensor, weights: LinearWeights, size: int, dtype: torch.dtype) -> Tensor:
    """Of the rows that are asked for alone."""
    weight, scale = weights.weight, weights.scale
    if scale is None:
        return weight[ids].to(dtype)
    if is_in_blocks(weights):
        return decode_blocks(weight[ids], scale).to(dtype)
    if scale.ndim == 1:
        return (weight[ids] * scale[ids].float()[:, None]).to(dtype)
    rows = (unpacked_rows(weight, ids, size) if weight.dtype == torch.uint8 else weight[ids]).float()
    group = group_size_of(size, scale.shape[1])

    def of_inputs(values: Tensor) -> Tensor:
        return values[ids // 16, :, ids % 16].float().repeat_interleave(group, dim=1)[:, :size]

    if weights.zero is not None:
        rows -= of_inputs(weights.zero)
    return rows.mul_(of_inputs(scale)).to(dtype)
