"""Modules that only DeBERTa v2 and v3 have.

Shape legend: E tokens of all inputs, L tokens of one input, M tokens of the longest that is read, H heads, D head
dimension, P rows of the table of distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.families.deberta_v2 import DebertaSpec, DisentangledAttentionSpec, PositionsSpec
from quire_models.layers.encoder import EncoderAttention
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Parameter, Scope
from quire_ops import EncoderAttentionWeights

__all__ = ["DebertaEncoder", "DisentangledAttention"]


class DistanceTable:
    """The embeddings of distances, [P, hidden_size], with their norm."""

    def __init__(self, spec: PositionsSpec, size: int, scope: Scope) -> None:
        """Args:
        scope: Scope of the network.
        """
        table: Parameter = (scope / "encoder.rel_embeddings").parameter("weight", 2 * spec.num_buckets, size)
        norm = None if spec.norm is None else make_norm(spec.norm, scope)
        self.rows: Tensor

        def finish() -> None:
            self.rows = table.take() if norm is None else norm(table.take())

        scope.when_loaded(finish)


class DebertaEncoder(EncoderOnly):
    """The network: an encoder whose layers share the embeddings of distances."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, DebertaSpec)
        table = DistanceTable(spec.positions, spec.hidden_size, scope)
        rows = distance_rows(spec.max_encoder_len, spec.positions).to(scope.device)
        for layer in self.layers:
            assert isinstance(layer.attention, DisentangledAttention)
            layer.attention.share(table, rows)


class DisentangledAttention(EncoderAttention):
    """x [E, hidden_size] -> [E, hidden_size]: every token attends to all tokens of its own input, by what they are and
    by how far they are apart."""

    def __init__(self, spec: DisentangledAttentionSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the attention itself.
        """
        super().__init__(spec, scope)
        own = {term: Linear.of(scope, each) for term, each in spec.position_projections().items()}
        shared = {"c2p": self.key, "p2c": self.query}
        self._projections = {term: own.get(term, shared[term]) for term in spec.terms}
        self._scope = scope
        self._rows: Tensor
        """[2 M - 1]: row of the table for each distance."""
        self._projected: dict[str, Tensor] = {}
        """Term -> projected embeddings of distances, [H, P, D]."""

    def share(self, table: DistanceTable, rows: Tensor) -> None:
        """Take the embeddings of distances of the network, once they are loaded.

        Args:
            rows: [2 M - 1], as `distance_rows` gives them.
        """
        self._rows = rows

        def finish() -> None:
            for term, project in self._projections.items():
                self._projected[term] = self._heads(project(table.rows))

        self._scope.when_loaded(finish)

    def _heads(self, x: Tensor) -> Tensor:
        """[L, H * D] -> [H, L, D]."""
        return x.view(len(x), -1, self._head_dim).transpose(0, 1)

    def __call__(
        self,
        x: Tensor,
        lens: list[int],
        rotation: tuple[Tensor, Tensor] | None = None,
        position_bias: Tensor | None = None,
        key_lens: list[int] | None = None,
    ) -> Tensor:
        """Args:
        lens: Tokens of each input, which stand one behind the other in x.
        rotation: None: positions are no rotations here.
        position_bias: None: neither are they biases.
        key_lens: Tokens of each input, from its first, that are attended to; None for all.
        """
        queries, keys, values = (projected.split(lens) for projected in self._qkv(x))
        texts = zip(queries, keys, values, lens if key_lens is None else key_lens, strict=True)
        attended = [
            self._attend_text(self._heads(query), self._heads(key[:key_len]), self._heads(value[:key_len]))
            for query, key, value, key_len in texts
        ]
        return self.out(torch.cat(attended))

    def fused_weights(self, rotation: int | None, position_bias: Tensor | None) -> EncoderAttentionWeights | None:
        """None: op `encoder_stack` has no scores of positions."""
        return None

    def _attend_text(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[H, L, D], and [H, K, D] of the first K tokens, of one input -> [L, H * D]."""
        tokens = torch.arange(query.shape[1], device=query.device)
        distance = tokens[:, None] - tokens[: key.shape[1]] + len(self._rows) // 2
        rows = self._rows[distance].expand(len(query), -1, -1)  # [H, L, K]
        scores = query @ key.mT
        if "c2p" in self._projected:
            scores = scores + (query @ self._projected["c2p"].mT).gather(-1, rows)
        if "p2c" in self._projected:
            of_keys = (key @ self._projected["p2c"].mT).gather(-1, rows.mT)  # [H, keys, queries]
            scores = scores + of_keys.mT
        weights = torch.softmax(scores * self._scale, dim=-1)
        attended: Tensor = (weights @ value).transpose(0, 1).flatten(1)
        return attended


def distance_rows(num_tokens: int, positions: PositionsSpec) -> Tensor:
    """[2 M - 1] int64: the row of the table of distances for a query that is so many tokens behind its key, from
    1 - M to M - 1.

    Half of the ranges are for one distance each, the others grow with its logarithm (He et al. 2021, and the code that
    came with it).
    """
    distance = torch.arange(1 - num_tokens, num_tokens)
    num = positions.num_buckets
    if positions.has_log_buckets:
        middle = num // 2
        far = distance.abs().clamp_min(middle)
        # In float32, as networks were trained: a distance at a border falls on the same side.
        share = torch.log(far / middle) / torch.log(torch.tensor((positions.max_distance - 1) / middle))
        far = middle + torch.ceil(share * (middle - 1)).to(torch.int64)
        distance = torch.where(distance.abs() <= middle, distance, far * distance.sign())
    return (distance + num).clamp(0, 2 * num - 1)
