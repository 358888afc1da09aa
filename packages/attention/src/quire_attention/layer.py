"""The attention of one layer, as networks use it."""

from __future__ import annotations

from torch import Tensor

from quire_attention.backend import AttentionBackend
from quire_attention.batch import ForwardBatch
from quire_attention.chunks import chunked

__all__ = ["Attention"]


class Attention:
    """Writes a layer's new keys and values into its cache, then attends over it."""

    __slots__ = (
        "_alibi_slopes",
        "_backend",
        "_chunk_tokens",
        "_layer",
        "_scale",
        "_sliding_window",
        "_soft_cap",
        "int8_products",
        "kv_scale",
    )

    def __init__(
        self,
        backend: AttentionBackend,
        layer: int,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """Args:
        layer: Index of the layer: which cache of the batch is its own.
        scale: Factor of the scores, usually head_dim ** -0.5.
        alibi_slopes: [Hq], what a head's scores lose for each token of distance.
        chunk_tokens: Tokens attend to those of their chunk only; None for no chunks.
        """
        self._backend = backend
        self._layer = layer
        self._scale = scale
        self._sliding_window = sliding_window
        self._soft_cap = soft_cap
        self.kv_scale: Tensor | None = None
        """[2, Hkv] float32: what the numbers of an fp8 cache are multiples of, keys' and values'. None for ones. Set by
        whoever loads the weights, before the first step."""
        self.int8_products = False
        """As op `paged_attention` takes it. Set by whoever loads the weights, where projections multiply in int8."""
        self._alibi_slopes = alibi_slopes
        self._chunk_tokens = chunk_tokens

    @property
    def is_chunked(self) -> bool:
        """Where chunks end is worked out on the host, in every step."""
        return self._chunk_tokens is not None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D], sinks [Hq] -> [T, Hq, D]."""
        self.write(key, value, batch)
        return self.attend(query, batch, sinks)

    def write(self, key: Tensor, value: Tensor, batch: ForwardBatch) -> None:
        """Keys and values [N, Hkv, D] into the layer's cache, where the batch says: those of the step's tokens; in
        cross attention those of `batch.encoder`."""
        kv_cache, metadata = batch.of_layer(self._layer)
        self._backend.write_kv_cache(key, value, kv_cache, metadata.slot_mapping, self.kv_scale)

    @property
    def rotates(self) -> bool:
        """Whether `rope_and_write_kv` can be called."""
        return self._backend.rope_and_write_kv is not None

    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Op `rope_and_write_kv` with the layer's cache: what `write` does with rotated keys -> the rotated queries."""
        kv_cache, metadata = batch.of_layer(self._layer)
        assert self._backend.rope_and_write_kv is not None
        return self._backend.rope_and_write_kv(
            query,
            key,
            value,
            cos,
            sin,
            kv_cache,
            metadata.slot_mapping,
            kv_scale=self.kv_scale,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
        )

    def attend(self, query: Tensor, batch: ForwardBatch, sinks: Tensor | None = None) -> Tensor:
        """query [T, Hq, D] -> [T, Hq, D] over what is in the layer's cache."""
        kv_cache, metadata = batch.of_layer(self._layer)
        if self._chunk_tokens is not None:
            metadata = chunked(metadata, self._chunk_tokens)
        return self._backend.paged_attention(
            query,
            kv_cache,
            metadata,
            scale=self._scale,
            sliding_window=None if metadata.paths_have_windows else self._sliding_window,
            soft_cap=self._soft_cap,
            sinks=sinks,
            kv_scale=self.kv_scale,
            alibi_slopes=self._alibi_slopes,
            int8_products=self.int8_products,
        )
