"""Modules that only Phi-3.5-MoE has.

Shape legend: T tokens of the step, E experts, I width of the network.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire_models.families.phimoe import SparseMixerMoESpec
from quire_models.layers.moe import FusedExperts
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope

__all__ = ["SparseMixerMoE", "sparse_mixer"]


def sparse_mixer(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Logits [T, E] float32 -> (ids [T, 2] int64, weights [T, 2] float32) (arXiv:2409.12136, sec. 2.1, without noise).

    The best expert's weight is its probability among those whose logits are near it; then the same without it.
    """
    sizes, left, chosen = logits.abs(), logits, []
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - logits) / torch.maximum(sizes, best)
        near = left.masked_fill(distance > threshold, float("-inf"))
        chosen.append((expert, torch.softmax(near, dim=-1).gather(1, expert)))
        left = left.scatter(1, expert, float("-inf"))
    ids, weights = zip(*chosen, strict=True)
    return torch.cat(ids, dim=-1), torch.cat(weights, dim=-1)


class SparseMixerMoE:
    """x [T, I] -> [T, I]: what the two experts of each token make of it."""

    __slots__ = ("_experts", "_router")

    def __init__(self, spec: SparseMixerMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, stacked = scope / spec.name, spec.stacked
        assert stacked is not None
        assert stacked.at is not None
        select = partial(sparse_mixer, threshold=spec.threshold)
        self._router = router = Router(inner / spec.router, spec.hidden_size, spec.num_experts, select)
        self._experts = FusedExperts(spec, inner / "experts")
        at = scope / stacked.at
        self._experts.accept_stacked(at, stacked.names, inputs_first=stacked.inputs_first)
        at.packed(stacked.router, router.shape, lambda tensor: [(router.name, tensor)])

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *self._router(x))
