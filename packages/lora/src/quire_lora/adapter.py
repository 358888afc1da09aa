"""`Adapter`: one adapter in host memory, in the form in which slots take it. Knows no files and no slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_ops import LoraWeights

__all__ = ["Adapter", "ExpertAdapter", "LinearAdapter", "TableAdapter", "narrowed"]

_TENSORS = ("a", "b", "scale", "shift", "a_scale", "b_scale", "weight")
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Narrow dtype -> largest magnitude of what is rounded to it."""


def narrowed(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in int8 or float8_e4m3fn. Values that the dtype has stay as they are; others are rounded, row by row.

    Args:
        values: [N, M] float32.
        scale: [N] float32: what they are multiplied with.

    Returns:
        The narrow values, and what they are multiplied with.
    """
    limit = _LARGEST[dtype]
    stored = values.clamp(-limit - (dtype == torch.int8), limit).to(dtype)
    if torch.equal(stored.float(), values):
        return stored, scale
    step = values.abs().amax(1) / limit
    step = torch.where(step > 0, step, 1.0)  # of numbers that are hardly any, too
    values = (values / step[:, None]).clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale * step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAdapter:
    """What is added to a linear layer's result: see op `lora_linear`."""

    a: Tensor
    """[rank, inputs] in the network's dtype, or narrow: int8 or float8_e4m3fn."""
    b: Tensor
    """[rank, outputs], scaling included, in `b_scale` where it is narrow."""
    scale: Tensor | None = None
    """[outputs] float32; None for ones."""
    shift: Tensor | None = None
    """[outputs] float32; None for zeros."""
    a_scale: Tensor | None = None
    """[rank] float32: what rows of a narrow `a` are multiplied with; None where it is in the network's dtype."""
    b_scale: Tensor | None = None
    """[outputs] float32: what columns of a narrow `b` are multiplied with."""

    @property
    def rank(self) -> int:
        return len(self.a)

    def product(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`a` and `b` in float32, on a device."""
        a, b = self.a.to(device).float(), self.b.to(device).float()
        if self.a_scale is None or self.b_scale is None:
            return a, b
        return a * self.a_scale.to(device)[:, None], b * self.b_scale.to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableAdapter:
    """What becomes of an embedding, or of an LM head: another weight, a product on top of it, or both."""

    weight: Tensor | None = None
    """[vocab_size, hidden_size], in the place of the network's."""
    a: Tensor | None = None
    """Embedding: [vocab_size, rank]. LM head: [rank, hidden_size]."""
    b: Tensor | None = None
    """Embedding: [rank, hidden_size]. LM head: [rank, vocab_size]. Scaling included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertAdapter:
    """What is added to the results of a layer's routed experts, in the form of op `lora_linear` with an expert in the
    place of a slot; None where no expert has any."""

    gate: LoraWeights | None
    up: LoraWeights | None
    down: LoraWeights | None

    @property
    def parts(self) -> tuple[LoraWeights, ...]:
        """Those that are there."""
        return tuple(part for part in (self.gate, self.up, self.down) if part is not None)


def stack_experts(adapters: Sequence[LinearAdapter | None]) -> LoraWeights | None:
    """The adapters of one matrix of each expert as one; None when there is none."""
    some = next((each for each in adapters if each is not None), None)
    if some is None:
        return None
    num, rank, outputs = len(adapters), max(each.rank for each in adapters if each is not None), some.b.shape[1]
    adjusted = [each is not None and (each.scale is not None or each.shift is not None) for each in adapters]
    a, b = some.a.new_zeros(num, rank, some.a.shape[1]), some.b.new_zeros(num, rank, outputs)
    width = outputs if any(adjusted) else 0
    scale, shift = torch.ones(num, width), torch.zeros(num, width)
    for expert, each in enumerate(adapters):
        if each is None:
            continue
        a[expert, : each.rank], b[expert, : each.rank] = each.a, each.b
        if each.scale is not None:
            scale[expert] = each.scale
        if each.shift is not None:
            shift[expert] = each.shift
    ranks = torch.tensor([0 if each is None else each.rank for each in adapters], dtype=torch.int32)
    return LoraWeights(
        a=a, b=b, ranks=ranks, adjusted=torch.tensor(adjusted, dtype=torch.int32), scale=scale, shift=shift
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter of one network."""

    linears: dict[str, LinearAdapter] = field(default_factory=dict)
    """Name of the layer, without ".weight", as `AdapterSlots` has it."""
    experts: dict[str, ExpertAdapter] = field(default_factory=dict)
    """Name of the routed experts of a layer, as `AdapterSlots` has it."""
    embedding: TableAdapter | None = None
    lm_head: TableAdapter | None = None

    @property
    def changes_vocabulary(self) -> bool:
        """Whether it changes the embedding or the LM head."""
        return self.embedding is not None or self.lm_head is not None

    @property
    def rank(self) -> int:
        """Largest rank of its layers."""
        ranks = [each.rank for each in self.linears.values()]
        ranks += [part.a.shape[1] for each in self.experts.values() for part in each.parts]
        return max(ranks, default=0)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        routed = [part for each in self.experts.values() for part in each.parts]
        parts = [*self.linears.values(), *routed, self.embedding, self.lm_head]
        tensors = [getattr(part, name, None) for part in parts for name in _TENSORS]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
