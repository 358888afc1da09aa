"""Modules that only Step-3 has.

Shape legend: T tokens of the step, Hq query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.step3_text import FactorisedAttentionSpec
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.rope_and_cache import RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope

__all__ = ["FactorisedAttention"]


class FactorisedAttention:
    """x [T, hidden_size] -> [T, hidden_size]: queries by two projections (arXiv:2507.19427, sec. 3.1)."""

    def __init__(self, spec: FactorisedAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        self.cache, self._head_dim = index, spec.head_dim
        _, key, value, out = spec.projections()
        self.q_proj, self.k_proj, self.v_proj = (Linear.of(scope, each) for each in (spec.down(), key, value))
        self._norm = make_norm(spec.q_latent, scope)
        self.wq, self.o_proj = Linear.of(scope, spec.up()), Linear.of(scope, out)
        self._attend = scope.attention(index, scale=spec.scale)
        self._write = RopeAndCache(self._attend, Rotary(scope, spec.rotary_dim, head_dim=spec.head_dim), None)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return (self.q_proj, self.k_proj, self.v_proj)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query = self.wq(self._norm(self.q_proj(x)))
        query, key, value = (
            each.unflatten(-1, (-1, self._head_dim)) for each in (query, self.k_proj(x), self.v_proj(x))
        )
        query = self._write(query, key, value, cos, sin, batch)
        return self.o_proj(self._attend.attend(query, batch).flatten(1))
