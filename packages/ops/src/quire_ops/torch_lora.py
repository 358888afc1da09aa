"""Op `lora_linear` through torch's own operators: two products for each slot in use."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.lora import LoraTokens, LoraWeights

__all__ = ["lora_linear"]


def lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Op `lora_linear`: products in the network's dtype, sums with the layer's result in float32."""
    ranks, adjusted = weights.ranks.tolist(), weights.adjusted.tolist()
    for slot, begin, end in tokens.groups.tolist():
        rank = ranks[slot]
        if not rank and not adjusted[slot]:
            continue
        which = tokens.order[begin:end]
        base = out.index_select(0, which).float()
        if adjusted[slot]:
            base = torch.addcmul(weights.shift[slot], base, weights.scale[slot])
        if rank:
            inner = torch.mm(x.index_select(0, which), weights.a[slot, :rank].T)
            base += torch.mm(inner, weights.b[slot, :rank])
        out.index_copy_(0, which.long(), base.to(out.dtype))
