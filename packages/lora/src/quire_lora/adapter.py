"""`Adapter`: one adapter in host memory, in the form in which slots take it. Knows no files and no slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Adapter", "LinearAdapter", "TableAdapter"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearAdapter:
    """What is added to a linear layer's result: see op `lora_linear`."""

    a: Tensor
    """[rank, inputs] in the network's dtype."""
    b: Tensor
    """[rank, outputs], scaling included."""
    scale: Tensor | None = None
    """[outputs] float32; None for ones."""
    shift: Tensor | None = None
    """[outputs] float32; None for zeros."""

    @property
    def rank(self) -> int:
        return len(self.a)


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
class Adapter:
    """An adapter of one network."""

    linears: dict[str, LinearAdapter] = field(default_factory=dict)
    """Name of the layer, without ".weight", as `AdapterSlots` has it."""
    embedding: TableAdapter | None = None
    lm_head: TableAdapter | None = None

    @property
    def changes_vocabulary(self) -> bool:
        """Whether it changes the embedding or the LM head."""
        return self.embedding is not None or self.lm_head is not None

    @property
    def rank(self) -> int:
        """Largest rank of its layers."""
        return max((each.rank for each in self.linears.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        parts = [*self.linears.values(), self.embedding, self.lm_head]
        tensors = [getattr(part, name, None) for part in parts for name in ("a", "b", "scale", "shift", "weight")]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
