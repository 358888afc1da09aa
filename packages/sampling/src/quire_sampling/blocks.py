"""A vocabulary row seen as blocks of 64 tokens: reductions per block, and fetching single blocks.

Reducing in fixed blocks makes three things cheap or certain: the search for a maximum or for a point of the
cumulative distribution touches the 152k-wide row once and then one block only; the rounding of a sum does not depend
on how many rows are in the batch; and the few largest tokens lie in the few blocks with the largest maxima.

Shapes: N rows, V vocabulary, C blocks (the last one may be short), B = 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "block_max", "block_sum", "take_blocks"]

BLOCK = 64


def block_max(x: Tensor) -> Tensor:
    """x [N, V] -> [N, C], the maximum of each block; NaN wherever a block holds one."""
    full, rest = _split(x)
    parts = [full.amax(-1)] if full.shape[1] else []
    if rest.shape[1]:
        parts.append(rest.amax(-1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def block_sum(x: Tensor) -> Tensor:
    """x [N, V] float32 -> [N, C] float64; summed in float32 inside a block."""
    full, rest = _split(x)
    parts = [full.sum(-1)] if full.shape[1] else []
    if rest.shape[1]:
        parts.append(rest.sum(-1, keepdim=True))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(torch.float64)


def take_blocks(x: Tensor, blocks: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Fetch whole blocks of each row.

    Args:
        x: [N, V].
        blocks: [N, K] int64, block numbers.
        fill: Value for places beyond the end of the row.

    Returns:
        Values [N, K * 64] and their token ids [N, K * 64]; ids beyond the end are at least V.
    """
    inside = torch.arange(BLOCK, device=x.device)
    ids = (blocks.unsqueeze(-1) * BLOCK + inside).flatten(1)
    values = x.gather(1, ids.clamp(max=x.shape[1] - 1))
    if x.shape[1] % BLOCK:
        values = values.masked_fill(ids >= x.shape[1], fill)
    return values, ids


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    cut = x.shape[1] // BLOCK * BLOCK
    return x[:, :cut].unflatten(1, (-1, BLOCK)) if cut else x[:, :0].unsqueeze(1)[:, :0], x[:, cut:]
