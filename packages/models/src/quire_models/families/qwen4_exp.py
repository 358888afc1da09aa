"""Qwen4-Exp (Qwen team 2026): gated delta nets and attention over the blocks of tokens that an index finds, experts in
every layer, several residual streams (hyper-connections), and embeddings of the last tokens together (n-grams)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, KVCacheSpec, LatentAttentionSpec, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.qwen2_moe import qwen_moe
from quire_models.families.qwen3_next import gated_delta
from quire_models.mixer_spec import RecurrentSpec, SelfAttentionSpec
from quire_models.spec import (
    CheckpointNames,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    NetworkSpec,
    StateInputs,
    Weight,
    inside,
    recast,
)

__all__ = [
    "BlockIndexSpec",
    "BlockSparseAttentionSpec",
    "GatedResidualSpec",
    "HyperLayerSpec",
    "HyperNetworkSpec",
    "NGramSpec",
    "spec",
]

KINDS = {
    "full_attention": True,
    "indexed_attention": True,
    "qwen_sparse_attention": True,
    "linear_attention": False,
}
"""Name of a layer's kind -> it attends."""
MAX_EXACT_TOKENS = 1 << 24
"""Token ids below it are float32 numbers, as which states keep them."""
POSITION_DIGITS = 3
"""Digits of a position to the base of 256, each of which is a number of every dtype of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttentionSpec(SelfAttentionSpec):
    """Attention over the tokens that the index beside it finds."""

    built_by: ClassVar[str] = "quire_models.families.qwen4_exp_layers:BlockSparseAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexSpec:
    """The index of such an attention: small heads score the mean key of each whole block of tokens. Its cache has the
    keys of tokens, and of a whole block at its last token."""

    name: str = "self_attn.indexer"
    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    num_blocks: int
    """Blocks that a token attends to at most, beside the tokens behind the last whole one."""
    block_tokens: int
    num_axes: int = 1
    """Axes of positions (M-RoPE). On several, a position does not follow from a token's place in its sequence, and
    stands behind the token's key: a block is rotated by that of its first token."""
    built_by: ClassVar[str] = "quire_models.families.qwen4_exp_layers:BlockIndex"

    @property
    def cache_width(self) -> int:
        """Numbers of a token: its key, and its position on each axis where there are several."""
        return self.head_dim + (POSITION_DIGITS * self.num_axes if self.num_axes > 1 else 0)

    @property
    def width(self) -> int:
        """Queries, and those in float32; positions and slots of what was found, two numbers of int64 each."""
        return 4 * self.num_heads * self.head_dim + 8 * (self.num_blocks + 1) * self.block_tokens

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """None."""
        return ()

    def projection(self) -> LinearSpec:
        """Queries of all heads, then one key."""
        return LinearSpec(
            name="index_qk_proj",
            in_features=self.hidden_size,
            out_features=(self.num_heads + 1) * self.head_dim,
        )

    def weights(self) -> Iterator[Weight]:
        """The projection and two norms."""
        yield from inside(self.name, self.projection().weights("attention"))
        for norm in ("q_layernorm", "k_layernorm"):
            yield Weight(f"{self.name}.{norm}.weight", (self.head_dim,), "norms")

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """A key of each token, with its position where it has several axes."""
        return LatentAttentionSpec(block_size=block_size, width=self.cache_width, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramSpec(RecurrentSpec):
    """Adds to each residual stream what embeddings of the last tokens together give (per-layer embedding, PLE): hashes
    of 2, 3, ... tokens choose rows of a table, the stream gates them, and a short convolution looks at those before."""

    name: str = "ple"
    hidden_size: int
    num_streams: int
    embed_dim: int
    """Width of all rows of a token together."""
    max_tokens: int
    """Tokens of the longest n-gram."""
    head_sizes: tuple[int, ...]
    """Rows that each hash chooses from, those of two tokens first; primes."""
    multipliers: tuple[int, ...]
    """Factor of each token of an n-gram in its hash, the last token first."""
    num_rows: int
    """Of the table, with those that no hash chooses."""
    num_shards: int
    """Tensors that the checkpoint cuts the table into."""
    is_float8: bool = False
    """The table is in FP8, with one factor."""
    boundary_token_id: int
    """N-grams do not reach beyond it."""
    conv_kernel: int
    eps: float
    reads_token_ids: ClassVar[bool] = True
    built_by: ClassVar[str] = "quire_models.families.qwen4_exp_layers:NGramEmbedding"

    @property
    def stream_size(self) -> int:
        """Width of all streams."""
        return self.num_streams * self.hidden_size

    @property
    def num_past(self) -> int:
        """Tokens before its own that the convolution sees: its taps are `max_tokens` apart."""
        return (self.conv_kernel - 1) * self.max_tokens

    @property
    def shard_rows(self) -> int:
        """Rows of each tensor of the table but the last, which may have fewer."""
        return -(-self.num_rows // self.num_shards)

    @property
    def width(self) -> int:
        """Embedding and value; keys, queries and gated values of all streams, twice in float32."""
        return 2 * self.embed_dim + 12 * self.stream_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the last token ids, as often as they are looked up."""
        last = self.max_tokens - 1
        return (
            StateTensor("conv", (self.num_past, self.stream_size), "float32"),
            StateTensor("tokens", (last, last), "float32"),
        )

    @property
    def state_inputs(self) -> StateInputs:
        """What is convolved, and the token ids in float32."""
        return StateInputs(self.stream_size, wide=self.max_tokens - 1)

    def projections(self) -> tuple[LinearSpec, LinearSpec]:
        """From the rows of a token to keys of all streams, and to one value."""
        sizes = {"key_proj": self.stream_size, "value_proj": self.hidden_size}
        key, value = (
            LinearSpec(name=name, in_features=self.embed_dim, out_features=size) for name, size in sizes.items()
        )
        return key, value

    def weights(self) -> Iterator[Weight]:
        """The table, projections, norms, convolution."""
        part, wide, table = "n-gram embedding", self.stream_size, f"{self.name}.ple_embedding"
        row = self.embed_dim // len(self.head_sizes)
        for shard, begin in enumerate(range(0, self.num_rows, self.shard_rows)):
            rows = min(self.shard_rows, self.num_rows - begin)
            yield Weight(f"{table}.ngram_embedding.shard_{shard}.weight", (rows, row), part, is_float8=self.is_float8)
        if self.is_float8:
            yield Weight(f"{table}.ngram_embedding.weight_scale", (1,), part, is_wide=True)
        yield Weight(f"{table}.layer_multipliers", (self.max_tokens,), part, is_buffer=True)
        for linear in self.projections():
            yield from inside(self.name, linear.weights(part))
        for norm in ("norm_key", "norm_query", "norm_conv"):
            yield Weight(f"{self.name}.{norm}.weight", (wide,), "norms")
        yield Weight(f"{self.name}.conv1d.weight", (wide, 1, self.conv_kernel), part)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResidualSpec:
    """Several residual streams before and behind a part of a layer: what it takes of each, and what it gives to each
    (hyper-connections, Zhu et al. 2024, arXiv:2409.19606, here with gates)."""

    name: str
    hidden_size: int
    num_streams: int
    rank: int
    """Width that the shares of the streams are projected from."""
    eps: float
    injects: bool = True
    """A part stands behind it; the last one only joins the streams."""

    def projections(self) -> tuple[LinearSpec, ...]:
        """Down to the rank and up again, then what is given to the streams."""
        wide = self.num_streams * self.hidden_size
        sizes = {"input_mix_weight_down": (wide, self.rank), "input_mix_weight_up": (self.rank, wide)}
        sizes |= {"block_inject_weight": (wide, self.num_streams)} if self.injects else {}
        return tuple(
            LinearSpec(name=name, in_features=inputs, out_features=outputs, is_plain=outputs == self.num_streams)
            for name, (inputs, outputs) in sizes.items()
        )

    def weights(self) -> Iterator[Weight]:
        """The norm and the projections."""
        yield Weight(f"{self.name}.hc_norm.weight", (self.num_streams * self.hidden_size,), "norms")
        for linear in self.projections():
            yield from inside(self.name, linear.weights("hyper-connections"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperLayerSpec(LayerSpec):
    """A layer over several residual streams: n-gram embeddings where it has them, a mixer, experts. Its first mixer is
    followed by an index or by n-gram embeddings, or by nothing."""

    residuals: tuple[GatedResidualSpec, GatedResidualSpec]
    """Around the mixer, and around the experts."""
    is_first: bool
    """It gets one stream, and begins all of them with it."""
    built_by: ClassVar[str] = "quire_models.families.qwen4_exp_layers:HyperLayer"

    def weights(self) -> Iterator[Weight]:
        """Those of its parts, and of the streams'."""
        yield from LayerSpec.weights(self)
        for residual in self.residuals:
            yield from inside(self.name, residual.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperNetworkSpec(NetworkSpec):
    """A network of such layers, whose streams are joined in the place of the last norm."""

    joined: GatedResidualSpec
    shares_heads: ClassVar[bool] = False
    has_one_stream: ClassVar[bool] = False
    built_by: ClassVar[str] = "quire_models.families.qwen4_exp_layers:HyperLM"

    @property
    def inner_width(self) -> int:
        """Most numbers of a part, beside the streams: as they are, as they become, normed and weighed in float32."""
        parts = (*self.mixers, *(layer.feed_forward for layer in self.layers))
        inner = max(part.width for part in parts if part is not None)
        return inner + 10 * self.joined.num_streams * self.hidden_size

    def weights(self) -> Iterator[Weight]:
        """Those of the layers, and what joins the streams."""
        yield from NetworkSpec.weights(self)
        yield from inside(self.body, self.joined.weights())


def spec(config: Fields) -> NetworkSpec:
    """`layer_types` or `full_attention_interval` say which layers attend; `ple_layer_ids` which have n-gram embeddings,
    counted from 1."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    config.fixed("indexer_kv_heads", 1)
    config.skip("router_aux_loss_coef", "mtp_*")
    sizes = decoder_sizes(config.with_default("intermediate_size", 512), head_dim=256, partial=1.0)
    gate = config.get("output_gate_type") or "silu"
    if gate not in ("silu", "sigmoid"):
        raise CheckpointError(f"{config.source}: output_gate_type must be silu or sigmoid, is {gate!r}")
    delta = gated_delta(config, sizes, by_key_head=False, output_gate=gate)
    bias = config.flag("attention_bias", default=False)
    attention = recast(BlockSparseAttentionSpec, sizes.attention(bias=bias, gated=True, **sizes.head_norms(offset=1.0)))
    interval = config.integer("full_attention_interval", default=4, minimum=1)
    default = [(layer + 1) % interval == 0 for layer in sizes.layers]
    attends = layer_kinds(config, "layer_types", sizes.num_layers, KINDS, default)
    index = _index(config, sizes) if any(attends) else None
    shared = config.integer("shared_expert_intermediate_size", default=512, minimum=1)
    moe = qwen_moe(config, sizes, inner=512, shared=shared, renormalize=True)
    ngrams = _ngrams(config, sizes, attends)

    def residual(name: str, *, injects: bool = True) -> GatedResidualSpec:
        return GatedResidualSpec(
            name=name,
            hidden_size=sizes.hidden_size,
            num_streams=config.integer("hc_count", default=4, minimum=2),
            rank=config.integer("hc_lowrank", default=320, minimum=1),
            eps=sizes.eps,
            injects=injects,
        )

    def mixers(layer: int) -> tuple[MixerSpec, ...]:
        if attends[layer] and index is not None:
            return (attention, index)
        return (delta, ngrams[layer]) if layer in ngrams else (delta,)

    return sizes.network(
        (
            HyperLayerSpec(
                name=f"model.layers.{layer}",
                mixers=mixers(layer),
                feed_forward=moe,
                residuals=(residual("attn_hyper_connection"), residual("mlp_hyper_connection")),
                is_first=layer == 0,
            )
            for layer in sizes.layers
        ),
        kind=HyperNetworkSpec,
        final_norm=None,
        joined=residual("hyper_connection_mixer", injects=False),
        caches_by_mixer=True,
        checkpoint=CheckpointNames(
            ignored_prefixes=("mtp.",), ignored_suffixes=(".ngram_heads_vocab_sizes", ".ngram_heads_offsets")
        ),
    )


def _index(config: Fields, sizes: DecoderSizes) -> BlockIndexSpec:
    budget = config.integer("indexer_budget", minimum=1)
    block_tokens = config.integer("indexer_compress_ratio", minimum=1)
    head_dim = config.integer("indexer_head_dim", minimum=1)
    if budget % block_tokens:
        raise CheckpointError(
            f"{config.source}: indexer_budget ({budget}) must be a multiple of indexer_compress_ratio ({block_tokens})"
        )
    if head_dim < sizes.rotary_dim:
        raise CheckpointError(
            f"{config.source}: indexer_head_dim ({head_dim}) must be at least the {sizes.rotary_dim} dimensions that "
            "are rotated"
        )
    return BlockIndexSpec(
        hidden_size=sizes.hidden_size,
        num_heads=config.integer("indexer_n_heads", minimum=1),
        head_dim=head_dim,
        rotary_dim=sizes.rotary_dim,
        eps=sizes.eps,
        num_blocks=budget // block_tokens,
        block_tokens=block_tokens,
        num_axes=1 if sizes.rope is None else len(sizes.rope.mrope_section) or 1,
    )


def _ngrams(config: Fields, sizes: DecoderSizes, attends: Sequence[bool]) -> dict[int, NGramSpec]:
    """Number of a layer, from 0 -> its n-gram embeddings."""
    listed = config.get("ple_layer_ids") or []
    allowed = [layer + 1 for layer in sizes.layers if not attends[layer]]
    if not isinstance(listed, list) or any(layer not in allowed for layer in listed):
        raise CheckpointError(
            f"{config.source}: ple_layer_ids must list layers with linear attention, counted from 1 (some of "
            f"{allowed}), is {listed!r}"
        )
    if not listed:
        config.skip("ple_*", "ngram_*", "heads_per_ngram", "make_ngram_*", "seed", "split_ngram_parts")
        return {}
    eos = config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise CheckpointError(f"{config.source}: eos_token_id must be a token, where n-grams end, is {eos!r}")
    if sizes.vocab_size > MAX_EXACT_TOKENS:
        raise CheckpointError(f"{config.source}: vocab_size must be at most {MAX_EXACT_TOKENS}, is {sizes.vocab_size}")
    max_tokens = config.integer("ngram_size", default=3, minimum=2)
    heads = (max_tokens - 1) * config.integer("heads_per_ngram", default=8, minimum=1)
    embed_dim = config.integer("ple_embed_dim", default=sizes.hidden_size, minimum=1)
    if embed_dim % heads:
        raise CheckpointError(f"{config.source}: ple_embed_dim ({embed_dim}) must be a multiple of {heads} hashes")
    base = config.integer("ngram_vocab_size_base", default=20_000_000, minimum=1)
    multiple = config.integer("make_ngram_vocab_size_divisible_by", default=128, minimum=1)
    quantization = config.object("quantization_config")
    is_float8 = quantization is not None and bool(quantization.get("modules_to_convert"))
    seed, layers, numbers = config.integer("seed", default=1234), sorted(set(listed)), primes(base)
    found: dict[int, NGramSpec] = {}
    for place, layer in enumerate(layers):
        head_sizes = tuple(next(numbers) for _ in range(heads))
        num_rows = -(-sum(head_sizes) // multiple) * multiple
        found[layer - 1] = NGramSpec(
            hidden_size=sizes.hidden_size,
            num_streams=config.integer("hc_count", default=4, minimum=2),
            embed_dim=embed_dim,
            max_tokens=max_tokens,
            head_sizes=head_sizes,
            multipliers=hash_multipliers(sizes.vocab_size, max_tokens, seed + 10007 * place),
            num_rows=num_rows,
            num_shards=config.integer("split_ngram_parts", default=512, minimum=1),
            is_float8=is_float8,
            boundary_token_id=eos,
            conv_kernel=config.integer("ple_conv_kernel_size", default=4, minimum=2),
            eps=sizes.eps,
        )
    return found


def primes(least: int) -> Iterator[int]:
    """Primes from `least` on."""
    return (n for n in count(max(2, least)) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))


def hash_multipliers(vocab_size: int, num: int, seed: int) -> tuple[int, ...]:
    """Odd factors, by which no token of the vocabulary leaves the whole numbers of 63 bits; by the generator splitmix64
    (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    bits, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    factors = []
    for place in range(1, num + 1):
        mixed = seed + gamma * (place + 1) & bits
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & bits
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & bits
        factors.append(2 * ((mixed ^ mixed >> 31) % half) + 1)
    return tuple(factors)
