"""Modules that only DBRX has.

Shape legend: E experts, M width within an expert, I width of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from quire_models.families.dbrx import DbrxMoESpec
from quire_models.layers.moe import SparseMoE
from quire_models.layers.scope import Scope

__all__ = ["make_moe"]


def make_moe(spec: DbrxMoESpec, scope: Scope) -> SparseMoE:
    """The mixture of a layer, in the scope of the layer; its files keep three matrices [E M, I]."""
    moe, inner = SparseMoE(spec, scope), scope / spec.name
    prefix, rows = f"{inner.prefix}experts", spec.intermediate_size

    def split(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(tensor.split(rows)):
            yield f"{prefix}.{expert}.{name}.weight", matrix.t() if name == spec.names[-1] else matrix

    for name in spec.names:
        (inner / "experts.mlp").packed(name, (spec.num_experts * rows, spec.hidden_size), partial(split, name=name))
    return moe
