"""Modules that only LongCat-Flash has.

Shape legend: T tokens of the step, H hidden size, R of a latent, P of a rotated key, K experts of a token, N tokens of
the longest n-gram.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.families.longcat_flash import HashedNGramSpec, ScaledLatentSpec, ShortcutLayerSpec, ZeroExpertsSpec
from quire_models.families.qwen4_exp_layers import LastTokens
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, make_router
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope

__all__ = ["HashedNGrams", "ScaledLatentAttention", "ShortcutLayer", "ZeroExperts"]


class ScaledLatentAttention(LatentAttention):
    """x [T, H] -> [T, H]; latents have a factor."""

    def __init__(self, spec: ScaledLatentSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._factor = spec.latent_factor

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no such factor."""

    def _row(self, latent_and_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, R + P]."""
        latent, key = super()._row(latent_and_key, cos, sin).split((self._rank, self._spec.rotary_dim), dim=-1)
        return torch.cat((latent * self._factor, key), dim=-1)


class ZeroExperts:
    """x [T, H] -> [T, H]: experts, and x itself by the weights of those that give it back."""

    def __init__(self, spec: ZeroExpertsSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, self._num = scope / spec.name, spec.num_experts
        self.router = make_router(dataclasses.replace(spec, num_experts=spec.num_experts + spec.num_zero), inner)
        self.experts = FusedExperts(spec, inner / "experts")

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)  # [T, K]
        computes = ids < self._num
        kept = (weights * ~computes).sum(dim=1, keepdim=True)
        out = self.experts(x, torch.where(computes, ids, 0), weights * computes)
        return out + (x.float() * kept).to(x.dtype)


class HashedNGrams:
    """Embeddings [T, H] -> [T, H], with those of n-grams."""

    def __init__(self, spec: HashedNGramSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the embeddings themselves.
        """
        self._index, self._sizes, self._vocab_size = index, spec.table_sizes, spec.vocab_size
        self._num_tables = len(spec.table_sizes) // (spec.max_tokens - 1)
        self._last = LastTokens(scope, spec.max_tokens - 1, spec.boundary_token_id)
        self._parameters = [
            (scope / "embedders" / str(table)).parameter("weight", rows, spec.row)
            for table, rows in enumerate(spec.table_sizes)
        ]
        self._projections = [Linear.of(scope, each) for each in spec.projections()]
        self._tables: list[Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._tables = [parameter.take() for parameter in self._parameters]

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._index)
        before, seen = self._last(batch.input_ids, state, layout)  # [T, N - 1], the last token first
        before = torch.where(seen, before, 0)
        total = x
        for number, (table, project, size) in enumerate(zip(self._tables, self._projections, self._sizes, strict=True)):
            hashed = batch.input_ids
            for place in range(number // self._num_tables + 1):
                hashed = hashed + before[:, place] * pow(self._vocab_size, place + 1, size)
            total = total + project(F.embedding(hashed % size, table))
        return total / (1 + len(self._tables))


class ShortcutLayer:
    """x [T, H] -> [T, H]."""

    def __init__(self, spec: ShortcutLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its first mixer's cache in a batch.
        scope: Scope of the layer.
        """
        assert spec.feed_forward is not None
        first, second, *ngrams = (build_mixer(each, index + i, scope) for i, each in enumerate(spec.mixers))
        self.mixers, self._ngrams = (first, second), ngrams[0] if ngrams else None
        self._norms = [make_norm(norm, scope) for norm in spec.norms]
        self.networks = [GatedMLP(each, scope / each.name) for each in spec.networks]
        self.experts = build_feed_forward(spec.feed_forward, scope)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        stream = x if residual is None else x + residual
        if self._ngrams is not None:
            stream = self._ngrams(stream, cos, sin, batch)
        shortcut: Tensor | None = None
        for half, (mixer, network) in enumerate(zip(self.mixers, self.networks, strict=True)):
            stream = stream + mixer(self._norms[2 * half](stream), cos, sin, batch)
            normed = self._norms[2 * half + 1](stream)
            shortcut = self.experts(normed) if shortcut is None else shortcut
            stream = stream + network(normed)
        assert shortcut is not None
        return shortcut, stream
