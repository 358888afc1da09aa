"""Modules of GLM-5.3 Flash.

Shape legend: T tokens of the step, H hidden size, S channels of the residual stream, Hi heads of the indexer, D their
dimension, K tokens that are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.families.deepseek_v4 import MixedStreamsSpec
from quire_models.families.deepseek_v4_layers import ClampedMLP, HyperConnection
from quire_models.families.deepseek_v32_layers import LightningIndexer, SparseLatentAttention
from quire_models.families.glm5_next import ClampedMLPSpec, MixedLayerSpec, PooledLatentSpec
from quire_models.families.hy_v4 import HyperNetworkSpec
from quire_models.families.hy_v4_layers import HyperDecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, ops

__all__ = ["MixedDecoderLM", "MixedLayer", "PooledLatentAttention", "clamped_mlp"]


class PooledIndexer(LightningIndexer):
    """An indexer that finds pools of tokens; it rotates nothing, and keeps of a token its key and the weight of that in
    a pool, [T, 2 D]."""

    def __init__(self, spec: PooledLatentSpec, scope: Scope) -> None:
        super().__init__(spec, scope)
        size, self._pool = spec.indexer.head_dim, spec.indexer.pool
        self.pool_gate = Linear(
            scope / "index_kpool_compress_gate", spec.hidden_size, size, method=scope.plain_method, is_replicated=True
        )
        self._bias_parameter = scope.parameter("index_kpool_compress_ape", self._pool, size, dtype=torch.float32)
        self._bias: Tensor
        """[tokens of a pool, D]."""
        self._find_pools = scope.op(ops.pooled_index_topk)

    def _finish(self) -> None:
        super()._finish()
        self._bias = self._bias_parameter.take()

    @property
    def of_input(self) -> tuple[Linear, ...]:
        """Key, and its weight in a pool."""
        return (self.key, self.pool_gate)

    def keys(self, made: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """[T, 2 D]."""
        return torch.cat((self.key_norm(made[0]), made[1]), dim=-1)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return heads

    def _found(self, query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout) -> Tensor:
        return self._find_pools(query, weights, key_cache, self._bias, layout, k=self._topk // self._pool)


def _as_it_is(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


class PooledLatentAttention(SparseLatentAttention):
    """x [T, H] -> [T, H], without positions."""

    make_indexer = PooledIndexer

    def __init__(self, spec: PooledLatentSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._rotate = _as_it_is  # type: ignore[assignment]  # in the place of a Rotary

    def fused_weights(self) -> None:
        """None: op `decoder_stack` rotates, and knows no index."""


class MixedLayer:
    """Channels [T, S, H] -> [T, S, H], which have no residual beside them."""

    def __init__(self, spec: MixedLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its mixer's cache in a batch.
        scope: Scope of the layer.
        """
        assert spec.input_norm is not None
        assert spec.feed_forward_norm is not None
        assert spec.feed_forward is not None
        assert isinstance(spec.streams, MixedStreamsSpec)
        self.mixer = build_mixer(spec.mixers[0], index, scope)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self.input_norm = make_norm(spec.input_norm, scope)
        self.feed_forward_norm = make_norm(spec.feed_forward_norm, scope)
        self._around_mixer = HyperConnection(spec.streams, scope / "attn_hc")
        self._around_feed_forward = HyperConnection(spec.streams, scope / "ffn_hc")

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        x = self._around_mixer(x, lambda own: self.mixer(self.input_norm(own), cos, sin, batch))
        return self._around_feed_forward(x, lambda own: self.feed_forward(self.feed_forward_norm(own))), None


def clamped_mlp(spec: ClampedMLPSpec, scope: Scope) -> ClampedMLP:
    """The network of a record, within the scope of its layer."""
    return ClampedMLP(spec, spec.limit, scope / spec.name)


class MixedDecoderLM(HyperDecoderLM):
    """The network."""

    def make_collapse(self, spec: HyperNetworkSpec, scope: Scope) -> Callable[[Tensor], Tensor]:
        """The mean of all channels."""
        return lambda streams: streams.float().mean(dim=1).to(streams.dtype)
