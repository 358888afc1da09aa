"""What stands between token ids and a network's first layer.

Shape legend: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import MediaEmbeds
from quire_models.layers.linear import Embedding, Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.layers.vocab_parallel import VocabParallelEmbedding
from quire_models.spec import EmbeddingSpec, PositionSpec
from quire_ops import LoraTokens

__all__ = ["TokenEmbedding"]


class TokenEmbedding:
    """(ids, positions), both [N] -> [N, hidden_size]: tokens, projection, factor, token types, positions, norm, as far
    as the record has them."""

    __slots__ = (
        "_adds_media",
        "_norm",
        "_norms_media",
        "_num_token_types",
        "_positions",
        "_project_in",
        "_projects_last",
        "_scales_media",
        "_token_types",
        "factor",
        "is_plain",
        "table",
    )

    table: Embedding
    """Of the tokens alone."""
    factor: float
    is_plain: bool
    """It is the table with the factor, and nothing else."""

    def __init__(self, spec: EmbeddingSpec, scope: Scope, table: Embedding | None = None) -> None:
        """Args:
        scope: Scope of the body.
        table: Tokens of another stack, where both have one table; None for its own.
        """
        make_table = Embedding if scope.tp_group is None else VocabParallelEmbedding
        self.table = table or make_table(scope / spec.name, spec.num_tokens, spec.size)
        self._project_in = None if spec.project_in is None else Linear.of(scope, spec.project_in)
        self._projects_last = spec.projects_last
        factor, self._scales_media, self._adds_media = spec.factor, spec.scales_media, spec.adds_media
        self._norms_media = spec.norms_media
        self.factor = float(torch.tensor(factor, dtype=scope.dtype)) if spec.is_factor_rounded else factor
        self._num_token_types = spec.num_token_types
        self._token_types: Embedding | None = None
        if spec.num_token_types:
            self._token_types = Embedding(scope / spec.token_types, spec.num_token_types, spec.size)
        self._positions: LearnedPositions | SinePositions | None = None
        if spec.positions is not None:
            self._positions = (LearnedPositions if spec.positions.name else SinePositions)(spec.positions, scope)
        self._norm = None if spec.norm is None else make_norm(spec.norm, scope)
        parts = (self._project_in, self._token_types, self._positions, self._norm)
        self.is_plain = all(part is None for part in parts)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        lora: LoraTokens | None,
        media: MediaEmbeds | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Args:
        lora: Which tokens have adapters, which may change their embedding.
        media: Rows of tokens that stand for media, whose ids need not be in the table; or what is added to tokens.
        token_type_ids: [N] int64, rows of the table of token types; None for the first one. Not read where the network
            has one token type, or none.
        """
        x = self.table(ids if media is None else self._known_ids(ids, media), lora)
        if self._project_in is not None and not self._projects_last:
            x = self._project_in(x)
        if self._norm is not None and not self._norms_media:
            x = self._norm(x)
        if media is not None and self._scales_media:
            x = self._with_media(x, media)
        if self.factor != 1.0:
            x = x * self.factor
        if media is not None and not self._scales_media:
            x = self._with_media(x, media)
        if self._token_types is not None:
            if token_type_ids is None or self._num_token_types == 1:
                token_type_ids = torch.zeros_like(ids)
            x = x + self._token_types(token_type_ids)
        if self._positions is not None:
            x = x + self._positions(positions)
        x = self._norm(x) if self._norm is not None and self._norms_media else x
        return self._project_in(x) if self._project_in is not None and self._projects_last else x

    def _known_ids(self, ids: Tensor, media: MediaEmbeds) -> Tensor:
        """ids [N], with one of the table where they stand for media."""
        return ids if self._adds_media else ids.index_fill(0, media.token_index, 0)

    def _with_media(self, x: Tensor, media: MediaEmbeds) -> Tensor:
        """x [N, H] with the first H columns of the media's embeddings in their rows, or added to them."""
        embeds = media.embeds[:, : x.shape[1]].to(x.dtype)
        put = x.index_add if self._adds_media else x.index_copy
        return put(0, media.token_index, embeds)


class LearnedPositions:
    """positions [N] -> [N, size], rows of a table."""

    __slots__ = ("_offset", "_table")

    def __init__(self, spec: PositionSpec, scope: Scope) -> None:
        self._offset = spec.offset
        self._table = Embedding(scope / spec.name, spec.num_positions + spec.offset, spec.size)

    def __call__(self, positions: Tensor) -> Tensor:
        return self._table(positions + self._offset if self._offset else positions)


class SinePositions:
    """positions [N] -> [N, size]: all sines, then all cosines (Vaswani et al. 2017, sec. 3.5), of wavelengths from 2 pi
    to 10000 * 2 pi, both ends included; the longest one left out, and all scaled, where the record says so."""

    __slots__ = ("_dtype", "_factor", "_frequencies", "_offset")

    def __init__(self, spec: PositionSpec, scope: Scope) -> None:
        half = spec.size // 2
        exponents = torch.arange(half, dtype=torch.float32, device=scope.device)
        exponents /= half - (not spec.is_scaled)
        self._factor = spec.size**-0.5 if spec.is_scaled else 1.0
        self._frequencies, self._offset, self._dtype = 10000.0**-exponents, spec.offset, scope.dtype

    def __call__(self, positions: Tensor) -> Tensor:
        angles = (positions + self._offset).float()[:, None] * self._frequencies
        return (torch.cat((angles.sin(), angles.cos()), dim=-1) * self._factor).to(self._dtype)
