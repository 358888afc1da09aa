"""The latent attention of Mistral Large 3."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.mistral4 import GrowingLatentSpec
from quire_models.layers.attention import QueryGrowth
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens

__all__ = ["GrowingLatentAttention"]


class GrowingLatentAttention(LatentAttention):
    """x [T, hidden_size] -> [T, hidden_size]; queries have a factor that follows from their position."""

    def __init__(self, spec: GrowingLatentSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._growth = QueryGrowth(spec.query_growth, scope.device)

    def fused_weights(self) -> None:
        """None: op `decoder_stack` has no such factor."""

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        cache, layout = batch.of_layer(self.cache)
        down, latent = self._down(x)
        self._write(self._row(latent, cos, sin), cache, layout.slot_mapping, self._rank)
        query = self._queries(self._query_latent(down), cos, sin)
        query = query * self._growth(batch.positions)[:, None, None].to(query.dtype)
        return self._output(self._attend(query, cache, layout, scale=self._spec.scale, rank=self._rank))
