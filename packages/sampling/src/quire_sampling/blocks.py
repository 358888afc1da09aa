"""A vocabulary row seen as blocks of 64 tokens: reductions per block, and fetching single blocks.

Reducing in blocks makes two things cheap: the search for a maximum or for a point of the cumulative distribution
touches the 152k-wide row once and then one block only; and the few largest tokens lie in the few blocks with the
largest maxima.

Shapes: N rows, V vocabulary, C blocks (the last one may be short), B = 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "block_max", "block_sum", "exact_sum", "take_blocks"]

BLOCK = 64


def block_max(x: Tensor) -> Tensor:
    """x [N, V] -> [N, C], the maximum of each block; NaN wherever a block holds one."""
    full, rest = _split(x)
    return torch.cat([full.amax(-1), rest.amax(-1)], dim=1) if rest.shape[1] else full.amax(-1)


def block_sum(x: Tensor) -> Tensor:
    """x [N, V] -> [N, C], the sum of each block."""
    full, rest = _split(x)
    return torch.cat([full.sum(-1), rest.sum(-1)], dim=1) if rest.shape[1] else full.sum(-1)


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
    """Views of x: the full blocks [N, V // 64, 64], and the short one [N, 1, V % 64] or nothing [N, 0, 0]."""
    num_rows, vocab_size = x.shape
    cut = vocab_size // BLOCK * BLOCK
    return x[:, :cut].view(num_rows, cut // BLOCK, BLOCK), x[:, cut:].view(
        num_rows, int(cut < vocab_size), vocab_size - cut
    )


def exact_sum(values: Tensor) -> Tensor:
    """values [V] -> their sum as a scalar float64, taken in blocks: it does not depend on the number of threads."""
    return block_sum(values.to(torch.float64).unsqueeze(0)).sum()
