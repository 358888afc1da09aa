"""Low-rank adapters of a linear layer, each for tokens of its own (Hu et al. 2021; the grouping of
tokens by adapter follows Sheng et al., "S-LoRA", 2023).

Knows slots, matrices and which token uses which slot; does not know adapters, files or requests.

Shape legend: T tokens of the step, M of them with an adapter, G slots in use in the step, S slots, R largest rank,
I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["NO_SLOT", "LoraTokens", "LoraWeights", "lora_linear"]

NO_SLOT = 1 << 30
"""Stands behind all slots, for tokens without one (`LoraTokens.is_fixed`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraWeights:
    """The adapters of one linear layer, by slot. The tensors never move: whoever fills slots writes into them."""

    a: Tensor
    """[S, R, I] in the network's dtype, or narrow: int8 or float8_e4m3fn; zeros behind a slot's rank."""
    b: Tensor
    """[S, R, O], transposed from how checkpoints keep it, and multiplied with the adapter's scaling; zeros likewise."""
    ranks: Tensor
    """[S] int32, on the host; 0 where the slot's adapter has no matrices for this layer."""
    adjusted: Tensor
    """[S] int32, on the host: whether the slot's `scale` and `shift` are in use."""
    scale: Tensor
    """[S, O] float32: what the layer's result is multiplied with before the rest is added (DoRA)."""
    shift: Tensor
    """[S, O] float32: what is added (biases)."""
    a_scale: Tensor | None = None
    """[S, R] float32: what rows of a narrow `a` are multiplied with; None where it is in the network's dtype."""
    b_scale: Tensor | None = None
    """[S, O] float32: what columns of a narrow `b` are multiplied with."""
    device_adjusted: Tensor | None = None
    """[S] int32: `adjusted` on the network's device, which captured steps read; None where none are captured."""

    def matrices(self, slot: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[rank, I] and [rank, O] of a slot in `dtype`; narrow ones times their scales in float32, then rounded."""
        a, b = self.a[slot, :rank], self.b[slot, :rank]
        if self.a_scale is None or self.b_scale is None:
            return a.to(dtype), b.to(dtype)
        return (a.float() * self.a_scale[slot, :rank, None]).to(dtype), (b.float() * self.b_scale[slot]).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraTokens:
    """Which tokens of a step use which slot."""

    slots: Tensor
    """[T] int32 on the network's device: the slot of each token, -1 for none."""
    order: Tensor
    """[M] int32 on the network's device: tokens with a slot, slot by slot, in their own order within."""
    groups: Tensor
    """[G, 3] int32 on the host: slot, and where its tokens begin and end in `order`."""
    is_fixed: bool = False
    """Steps are captured with these tensors, and write into them which slots they use: nothing may depend on what is in
    them now, nor on what is in the slots. All tokens are in `order`, those of slot `NO_SLOT`
    last; `groups` is empty. Only for backends of op `lora_linear` with `device_lengths`."""

    @classmethod
    def of(cls, slots: NDArray[np.int32], device: torch.device | str = "cpu") -> LoraTokens | None:
        """From the slot of each token [T], -1 for none; None when no token has one."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        order = order[np.searchsorted(slots[order], 0) :]
        if not len(order):
            return None
        used, begins = np.unique(slots[order], return_index=True)
        groups = np.stack([used, begins, np.append(begins[1:], len(order))], axis=1).astype(np.int32)
        return cls(
            slots=torch.from_numpy(slots).to(device),
            order=torch.from_numpy(order).to(device),
            groups=torch.from_numpy(groups),
        )


@op
def lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Adapters on top of a linear layer's result, in place: out = out * scale + (x @ a.T) @ b + shift with the matrices
    of the token's slot; tokens without a slot keep theirs. x [T, I]; out [T, O] of x's dtype or float32, of which the
    tokens may be apart. Narrow matrices give the bits that they would give widened to x's dtype."""
    adjusted = weights.adjusted.tolist()
    for token, slot in enumerate(tokens.slots.tolist()):
        if slot < 0 or slot == NO_SLOT:
            continue
        a, b = weights.matrices(slot, weights.a.shape[1], x.dtype)
        delta = x[token].double() @ a.double().T @ b.double()
        base = out[token].double()
        if adjusted[slot]:
            base = base * weights.scale[slot].double()
            delta = delta + weights.shift[slot].double()
        out[token] = (base + delta).to(out.dtype)


@torch_backend_for(lora_linear)
def _torch_lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Two products for each slot in use, in the network's dtype; sums with the layer's result in float32."""
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
            a, b = weights.matrices(slot, rank, x.dtype)
            base += torch.mm(torch.mm(x.index_select(0, which), a.T), b)
        out.index_copy_(0, which.long(), base.to(out.dtype))
