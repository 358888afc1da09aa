"""Encoders as data, alone and beside a decoder. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CrossAttentionSpec, Fields, FullAttentionSpec, KVCacheSpec, StateTensor
from quire_models.mixer_spec import BART_NAMES, ProjectionNames
from quire_models.rope_config import RopeConfig
from quire_models.shards import HeadShard, OutputShard
from quire_models.spec import EmbeddingSpec, LayerSpec, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = [
    "CrossLayerSpec",
    "DistanceBiasSpec",
    "EncoderAttentionSpec",
    "EncoderDecoderSpec",
    "EncoderSpec",
    "start_token_ids",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAttentionSpec:
    """Attention of every token to all tokens of its own text; or of a decoder's tokens to what an encoder read."""

    name: str
    hidden_size: int
    num_heads: int
    head_dim: int
    scale: float
    """Factor of the scores."""
    bias: bool
    """Of all projections but those of `unbiased`."""
    names: ProjectionNames = BART_NAMES
    unbiased: tuple[str, ...] = ()
    """Names of projections without a bias."""
    sliding_window: int | None = None
    """Tokens see those at most so far away, in each direction; None for all."""
    look_ahead: int | None = None
    """Of the tokens behind it, each sees at most so many; None for as many as before it."""
    rope: RopeConfig | None = None
    kv_heads: int = 0
    """Heads of keys and values; 0 for as many as of queries."""
    interleaved: bool = False
    """Neighbours are the pairs that are rotated (2i, 2i + 1), not (i, i + rotary_dim / 2)."""
    q_norm: NormSpec | None = None
    """Of each query head, before it is rotated."""
    k_norm: NormSpec | None = None
    """Of each key head, before it is rotated."""
    heads: HeadShard | None = None
    """Which heads `num_heads` and `kv_heads` count, of a tensor-parallel rank; None where they are all."""

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, from the first."""
        return 0 if self.rope is None else int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def width(self) -> int:
        return 0

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return ()

    def projections(self) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
        """Queries, keys, values, output."""
        hidden, size, heads = self.hidden_size, self.head_dim, self.heads
        inner, kv = self.num_heads * size, self.num_kv_heads * size
        own: tuple[OutputShard | None, OutputShard | None] = (None, None)
        if heads is not None:
            inner, kv = heads.num_heads * size, heads.num_kv_heads * size
            own = heads.queries(size), heads.keys(size)

        def linear(name: str, in_features: int, out_features: int, shard: OutputShard | None = None) -> LinearSpec:
            has_bias = self.bias and name not in self.unbiased
            return LinearSpec(name=name, in_features=in_features, out_features=out_features, bias=has_bias, shard=shard)

        query, key, value, out = self.names
        return (
            linear(query, hidden, inner, own[0]),
            linear(key, hidden, kv, own[1]),
            linear(value, hidden, kv, own[1]),
            linear(out, inner, hidden),
        )

    def weights(self) -> Iterator[Weight]:
        for linear in self.projections():
            yield from inside(self.name, linear.weights("attention"))
        for norm in (self.q_norm, self.k_norm):
            yield from inside(self.name, norm.weights() if norm is not None else ())

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """Keys and values of all tokens, where something keeps them."""
        return FullAttentionSpec(
            block_size=block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBiasSpec:
    """Biases of attention scores by distance between tokens (T5, Raffel et al. 2020, sec. 2.1): one for each head and
    each range of distances."""

    names: tuple[str, ...]
    """Full names of the tables, [num_buckets, num_heads]: one for each layer, or one that all share."""
    num_heads: int
    num_buckets: int
    """Number of ranges of distances, in both directions together."""
    max_distance: int
    """From here on all distances are in one range."""

    def weights(self) -> Iterator[Weight]:
        """The tables."""
        for name in self.names:
            yield Weight(f"{name}.weight", (self.num_buckets, self.num_heads), "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(NetworkSpec):
    """A network that reads whole texts, of up to `max_encoder_len` tokens, and keeps nothing of them. Layers of the
    same name are one layer, which runs several times (ALBERT)."""

    has_lm_head: bool = False
    distance_bias: DistanceBiasSpec | None = None
    """None where scores have no biases."""
    is_causal: bool = False
    """Tokens see only themselves and those before them (CLIP's texts)."""
    is_encoder: ClassVar[bool] = True
    built_by: ClassVar[str] = "quire_models.layers.encoder_only:EncoderOnly"

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the table of tokens."""
        yield from {weight.name: weight for weight in NetworkSpec.weights(self)}.values()
        if self.distance_bias is not None:
            yield from self.distance_bias.weights()

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """Nothing."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossLayerSpec(LayerSpec):
    """A decoder's layer with attention to what an encoder read, between its two parts."""

    cross: EncoderAttentionSpec
    cross_norm: NormSpec
    """Before the cross attention, or behind its sum in a post-LN layer."""

    def weights(self) -> Iterator[Weight]:
        """Parameters of all its parts, by their full names."""
        yield from LayerSpec.weights(self)
        yield from inside(self.name, self.cross.weights())
        yield from inside(self.name, self.cross_norm.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderSpec(NetworkSpec):
    """A decoder that attends to what an encoder made of another text. `layers` are the decoder's, and `embedding` what
    stands around the tokens of the decoder."""

    shared: str
    """Full name of the table of tokens, which both stacks have."""
    encoder_body: str
    encoder_embedding: EmbeddingSpec
    encoder_layers: tuple[LayerSpec, ...]
    encoder_norm: NormSpec | None
    """Behind the encoder's layers."""
    built_by: ClassVar[str] = "quire_models.layers.encoder_decoder:EncoderDecoderLM"

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs, in either stack."""
        parts = [layer.feed_forward for layer in self.encoder_layers]
        return max(3 * self.intermediate_size, *(part.width for part in parts if part is not None))

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the tables of embedding and head."""
        yield from NetworkSpec.weights(self)
        yield from inside(self.encoder_body, self.encoder_embedding.weights())
        for layer in self.encoder_layers:
            yield from layer.weights()
        if self.encoder_norm is not None:
            yield from inside(self.encoder_body, self.encoder_norm.weights())

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """First the decoder's own attention, then its cross attention, by layers; see `NetworkSpec.kv_cache_specs`."""
        specs = NetworkSpec.kv_cache_specs(self, block_size, dtype)
        first = next(layer.cross for layer in self.layers if isinstance(layer, CrossLayerSpec))
        cross = CrossAttentionSpec(
            block_size=block_size,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            dtype=dtype,
            max_encoder_tokens=self.max_encoder_len,
        )
        return specs | {f"{name}.cross": cross for name in list(specs)}


def start_token_ids(config: Fields, default: tuple[int, ...]) -> tuple[int, ...]:
    """What a decoder begins with: its start token, then the token that generation is made to begin with, if there is
    one.

    Args:
        config: Of the network, or of generation.
        default: The ids where `config` does not say; the first one is the start token.
    """
    forced = config.token_ids("forced_bos_token_id")[:1]
    return (config.token_ids("decoder_start_token_id") or default)[:1] + (forced or default[1:])
