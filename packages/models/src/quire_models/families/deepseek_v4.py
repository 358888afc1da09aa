"""DeepSeek-V4 (DeepSeek-AI 2026): attention to a window, and to entries that tokens before it were compressed to;
several residual streams beside one another (hyper-connections, Xie et al. 2026); experts, which the first layers choose
by the token alone.

Each layer keeps one row for each token of its window: the key, which is the value, too, and what compresses the windows
that are still open. What they were compressed to is kept for all tokens, in one cache for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from quire_interfaces import (
    LATENT_CACHE_DTYPES,
    CheckpointError,
    ConfigError,
    Fields,
    KVCacheSpec,
    LatentAttentionSpec,
    SlidingLatentSpec,
    StateTensor,
)
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.glm4_moe import LEAST_SCORES
from quire_models.families.hy_v4 import HyperLayerSpec, HyperNetworkSpec, StreamsSpec
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.rope_config import RopeConfig, parse_rope
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = [
    "CompressedEntriesSpec",
    "CompressorSpec",
    "DeepseekV4LayerSpec",
    "DeepseekV4MoESpec",
    "DeepseekV4Spec",
    "EntryIndexSpec",
    "HashMoESpec",
    "MixedStreamsSpec",
    "WindowAttentionSpec",
    "spec",
]

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {kind: kind for kind in (SLIDING, SPARSE, HEAVY)}
KINDS_OF_RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Element of `compress_ratios`, as published -> kind of the layer."""
MOE_KINDS = {"moe": False, "hash_moe": True}
"""Name of a kind of experts -> they are chosen by the token alone."""


class EntryShape(NamedTuple):
    """Entries of one kind of one layer."""

    size: int
    """Numbers of an entry."""
    rate: int
    """Tokens of its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedEntriesSpec:
    """What windows of tokens were compressed to, for all layers: no mixer, but a cache that theirs share. An entry is
    spread over the last slots of its window that lie in one block (`quire_ops.compressed_attention`), so that each
    token's row has a part of it.

    One cache, and not one for each layer: blocks of all caches are as large as the largest of them, and an entry takes
    a small part of what a layer keeps of a token in its window.
    """

    name: str = "compressed"
    shapes: tuple[EntryShape, ...]

    @property
    def width(self) -> int:
        """Nothing: the mixers that write entries count what they keep."""
        return 0

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """None."""
        return ()

    def weights(self) -> Iterator[Weight]:
        """None."""
        return iter(())

    def columns(self, block_size: int) -> tuple[slice, ...]:
        """The part of a token's row that belongs to each kind of entry."""
        widths = [-(-shape.size // math.gcd(shape.rate, block_size)) for shape in self.shapes]
        return tuple(slice(end - width, end) for end, width in zip(accumulate(widths), widths, strict=True))

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """Parts of entries, of all tokens."""
        width = self.columns(block_size)[-1].stop
        return LatentAttentionSpec(block_size=block_size, width=width, dtype=_known_dtype(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorSpec:
    """norm(sum of kv(x), weighed by a softmax of gate(x) + bias), over the tokens of a window (sec. 2.3.1)."""

    name: str
    hidden_size: int
    size: int
    """Numbers of an entry."""
    rate: int
    overlaps: bool
    """Tokens count in the window behind their own, too, with another value."""
    eps: float

    @property
    def row_width(self) -> int:
        """Numbers of a token's values, and as many of its gates."""
        return (2 if self.overlaps else 1) * self.size

    @property
    def norm(self) -> NormSpec:
        """The norm of entries."""
        return NormSpec(name="kv_norm", size=self.size, eps=self.eps)

    def projections(self) -> tuple[LinearSpec, LinearSpec]:
        """Values and gates."""
        hidden, width = self.hidden_size, self.row_width
        values, gates = (
            LinearSpec(name=name, in_features=hidden, out_features=width) for name in ("kv_proj", "gate_proj")
        )
        return values, gates

    def weights(self) -> Iterator[Weight]:
        """Projections, biases of places, and the norm."""
        for linear in self.projections():
            yield from inside(self.name, linear.weights("attention"))
        yield Weight(f"{self.name}.position_bias", (self.rate, self.row_width), "attention", is_wide=True)
        yield from inside(self.name, self.norm.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexSpec:
    """How a token chooses entries: by small heads of its own, and by entries for them (eq. 13 to 17)."""

    compressor: CompressorSpec
    num_heads: int
    topk: int

    def projection(self, latent: int) -> LinearSpec:
        """The queries, from those of the attention's latent."""
        name = f"{self.compressor.name}.q_b_proj"
        return LinearSpec(name=name, in_features=latent, out_features=self.num_heads * self.compressor.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAttentionSpec:
    """Attention with one key for all heads, which is the value, too, over a window and, with a compressor, over
    entries. Its output is rotated back, and projected in groups of heads (sec. 2.3)."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    """Dimensions of a head that are rotated, its last ones."""
    rope: RopeConfig
    q_lora_rank: int
    sliding_window: int
    num_groups: int
    group_rank: int
    """Numbers that each group of heads is projected to."""
    eps: float
    compressor: CompressorSpec | None = None
    """None for the window alone."""
    index: EntryIndexSpec | None = None
    """What chooses entries; None for all."""
    entries: CompressedEntriesSpec | None = None
    """Where all layers keep their entries."""
    first_shape: int = 0
    """The first of its own among their shapes."""
    built_by: ClassVar[str] = "quire_models.families.deepseek_v4_layers:WindowAttention"
    score_copies: ClassVar[int] = 2

    @property
    def num_kv_heads(self) -> int:
        """One, for all heads."""
        return 1

    @property
    def compressors(self) -> tuple[CompressorSpec, ...]:
        """That of the entries, and that of the index."""
        found = (self.compressor, None if self.index is None else self.index.compressor)
        return tuple(each for each in found if each is not None)

    @property
    def row_width(self) -> int:
        """Numbers of a token in its window: key, values and gates."""
        return self.head_dim + sum(2 * each.row_width for each in self.compressors)

    @property
    def kept_tokens(self) -> int:
        """Tokens whose rows may be read: those of the window, and of what is compressed where an entry ends."""
        return max(self.sliding_window, *((2 if each.overlaps else 1) * each.rate for each in self.compressors), 1)

    @property
    def width(self) -> int:
        """Queries, what they attended to, and the index's queries in float32."""
        index = 0 if self.index is None else 4 * self.index.num_heads * self.index.compressor.size
        return 5 * self.num_heads * self.head_dim + 2 * self.row_width + index

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """None."""
        return ()

    def norm(self, name: str, size: int) -> NormSpec:
        """A norm of it."""
        return NormSpec(name=name, size=size, eps=self.eps)

    @property
    def query(self) -> LinearSpec:
        """Latent -> queries of all heads."""
        width = self.num_heads * self.head_dim
        return LinearSpec(name="q_b_proj", in_features=self.q_lora_rank, out_features=width)

    @property
    def groups(self) -> LinearSpec:
        """The projections of all groups, one below the other: each from the outputs of its own heads."""
        inputs = self.num_heads * self.head_dim // self.num_groups
        return LinearSpec(name="o_a_proj", in_features=inputs, out_features=self.num_groups * self.group_rank)

    def down(self) -> tuple[LinearSpec, LinearSpec]:
        """The latent of queries, and the key."""
        hidden = self.hidden_size
        latent = LinearSpec(name="q_a_proj", in_features=hidden, out_features=self.q_lora_rank)
        return latent, LinearSpec(name="kv_proj", in_features=hidden, out_features=self.head_dim)

    @property
    def out(self) -> LinearSpec:
        """The groups' outputs -> the hidden size."""
        return LinearSpec(name="o_b_proj", in_features=self.num_groups * self.group_rank, out_features=self.hidden_size)

    def weights(self) -> Iterator[Weight]:
        """Its parameters."""
        yield from inside(self.name, self._weights())

    def _weights(self) -> Iterator[Weight]:
        for linear in (*self.down(), self.query, self.out):
            yield from linear.weights("attention")
        # Multiplied group by group, so that it stays as numbers whatever the linear method is.
        groups = self.groups
        yield Weight(f"{groups.name}.weight", (groups.out_features, groups.in_features), "attention")
        yield from self.norm("q_a_norm", self.q_lora_rank).weights()
        yield from self.norm("kv_norm", self.head_dim).weights()
        yield Weight("sinks", (self.num_heads,), "attention", is_wide=True)
        for compressor in self.compressors:
            yield from compressor.weights()
        if self.index is not None:
            yield from self.index.projection(self.q_lora_rank).weights("attention")
            name, shape = f"{self.index.compressor.name}.scorer.weights_proj.weight", self.index.num_heads
            yield Weight(name, (shape, self.hidden_size), "attention", is_wide=True)

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """Rows of a window."""
        return SlidingLatentSpec(
            block_size=block_size,
            width=self.row_width,
            dtype=_known_dtype(dtype),
            sliding_window=self.kept_tokens,
        )


def _known_dtype(dtype: str) -> str:
    choices = LATENT_CACHE_DTYPES[:-1]  # not the layout of plain latents
    if dtype not in choices:
        raise ConfigError(
            f"compressed attention keeps nothing in {dtype}; its KV cache can be {', '.join(choices)} "
            "(kv_cache_dtype auto)",
            field="kv_cache_dtype",
        )
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4MoESpec(SparseMoESpec):
    """Experts whose gate is kept below the limit, and what it weighs within it, before the activation; so it is with
    the shared network."""

    built_by: ClassVar[str] = "quire_models.families.deepseek_v4_layers:DeepseekV4MoE"


@dataclass(frozen=True, slots=True, kw_only=True)
class HashMoESpec(DeepseekV4MoESpec):
    """Such experts, of which a token's number says which ones are its own; the router says how much they count."""

    vocab_size: int

    def weights(self) -> Iterator[Weight]:
        """With the table of tokens' experts."""
        yield from DeepseekV4MoESpec.weights(self)
        shape = (self.vocab_size, self.routing.top_k)
        yield Weight(f"{self.name}.{self.router}.tid2eid", shape, "experts", is_buffer=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStreamsSpec(StreamsSpec):
    """Residual streams that are mixed before a part of a layer writes to them (manifold-constrained hyper-connections,
    Xie et al. 2026)."""

    num_iterations: int
    """Of Sinkhorn and Knopp, which make sums of the mixing weights' rows and columns one."""

    def weights(self, name: str, gates: int, prefix: str = "") -> Iterator[Weight]:
        """Of a part, the gates by which it reads and writes, and the weights of mixing; behind the last layer, as in
        the other record."""
        if gates == 1:
            yield from StreamsSpec.weights(self, name, gates, prefix)
            return
        rows, width = (2 + self.num_streams) * self.num_streams, self.num_streams * self.hidden_size
        for part, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (3,))):
            yield Weight(f"{name}.{prefix}{part}", shape, "norms", is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4LayerSpec(HyperLayerSpec):
    """Attention and experts. The first layer also has the cache of all entries."""

    built_by: ClassVar[str] = "quire_models.families.deepseek_v4_layers:DeepseekV4Layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Spec(HyperNetworkSpec):
    """A network of such layers."""

    built_by: ClassVar[str] = "quire_models.families.deepseek_v4_layers:DeepseekV4ForCausalLM"


def spec(config: Fields) -> NetworkSpec:
    """Layers that predict further tokens (multi-token prediction) are not loaded."""
    for name in ("attention_bias", "mlp_bias"):
        config.fixed(name, False)
    config.fixed("norm_topk_prob", True)
    config.fixed("num_key_value_heads", 1)
    config.skip("num_nextn_predict_layers")
    sizes = decoder_sizes(
        config.named(intermediate_size="moe_intermediate_size").with_default("num_key_value_heads", 1),
        head_dim=512,
        rotary=False,
    )
    main, compressed = _ropes(config, sizes)
    attentions = _attentions(config, sizes, main, compressed)
    streams = MixedStreamsSpec(
        num_streams=config.integer("hc_mult", default=4, minimum=1),
        hidden_size=sizes.hidden_size,
        norm_eps=sizes.eps,
        gate_eps=config.number("hc_eps", default=1e-6, minimum=0.0),
        magnitude=2.0,
        num_iterations=config.integer("hc_sinkhorn_iters", default=20, minimum=1),
    )
    moes = _moes(config, sizes)

    def layer_of(layer: int) -> DeepseekV4LayerSpec:
        entries = attentions[0].entries if layer == 0 else None
        return DeepseekV4LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(attentions[layer],) if entries is None or not entries.shapes else (attentions[layer], entries),
            feed_forward=moes[layer],
            input_norm=sizes.rms_norm("input_layernorm"),
            feed_forward_norm=sizes.rms_norm("post_attention_layernorm"),
            streams=streams,
        )

    sizes = replace(sizes, max_model_len=compressed.context_length(sizes.max_model_len))
    return sizes.network(
        map(layer_of, sizes.layers),
        kind=DeepseekV4Spec,
        streams=streams,
        caches_by_mixer=True,
        checkpoint=CheckpointNames(
            ignored_prefixes=("mtp.", "model.mtp."), default_prefix="model.", renamed=_PUBLISHED_NAMES
        ),
    )


_PUBLISHED_NAMES = (
    (".scale", ".weight_scale_inv"),
    ("_hc.weight_scale_inv", "_hc.scale"),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".indexer.compressor.", ".compressor.indexer."),
    (".self_attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".self_attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    ("model.embed.", "model.embed_tokens."),
    ("model.head.", "lm_head."),
    *((f"model.hc_head_{part}", f"model.hc_head.hc_{part}") for part in ("fn", "base", "scale")),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    *((f".hc_{part}_", f".{part}_hc.") for part in ("attn", "ffn")),
    (".attn_sink", ".sinks"),
    (".self_attn.norm.", ".self_attn.kv_norm."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".ape", ".position_bias"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
"""Part of a name as DeepSeek publishes it -> the same in Transformers."""


def _ropes(config: Fields, sizes: DecoderSizes) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers that see their window alone, and of all others.

    Raises:
        CheckpointError: An odd number of dimensions, or none, would be rotated.
    """
    share = config.number("partial_rotary_factor", default=None, above=0.0)
    rotated = config.integer("qk_rope_head_dim", default=None, minimum=2)
    if share is None:
        share = 64 / 512 if rotated is None else rotated / sizes.head_dim
    context = sizes.max_model_len
    theta = config.number("rope_theta", default=10000.0, above=1.0)
    compressed = config.number("compress_rope_theta", default=160000.0, above=1.0)
    spelled = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(spelled) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{config.source}: {spelled} must be an object, is {given!r}")
    kinds = given if all(isinstance(given.get(kind), Mapping) for kind in ("main", "compress")) else {
        "main": {"rope_theta": theta, "partial_rotary_factor": share},
        "compress": {**given, "rope_theta": compressed, "partial_rotary_factor": share},
    }  # fmt: skip
    kinds = {kind: {"attention_factor": 1.0, **kinds[kind]} for kind in ("main", "compress")}
    fields = Fields({"rope_parameters": kinds}, config.source)
    ropes = [parse_rope(fields, max_position_embeddings=context, layers=kind) for kind in kinds]
    for rope in ropes:
        dims = int(sizes.head_dim * rope.partial_rotary_factor)
        if dims < 2 or dims % 2:
            raise CheckpointError(
                f"{config.source}: an even number of each head's {sizes.head_dim} dimensions must be rotated, and "
                f"partial_rotary_factor {rope.partial_rotary_factor} makes {dims}"
            )
    return ropes[0], ropes[1]


def _kinds(config: Fields, layers: int) -> Sequence[str]:
    """Of each layer: from `layer_types`, or from `compress_ratios`, whose list may go on behind the last layer."""
    ratios = config.get("compress_ratios")
    if config.get("layer_types") is None and ratios is not None:
        known = tuple(KINDS_OF_RATIOS)
        if not isinstance(ratios, list) or len(ratios) < layers or any(each not in known for each in ratios):
            raise CheckpointError(
                f"{config.source}: compress_ratios must be 0, 4 or 128 for each of {layers} layers, is {ratios!r}"
            )
        return [KINDS_OF_RATIOS[each] for each in ratios[:layers]]
    by_turns = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(layers)]
    return layer_kinds(config, "layer_types", layers, KINDS, by_turns)


def _attentions(
    config: Fields, sizes: DecoderSizes, main: RopeConfig, compressed: RopeConfig
) -> list[WindowAttentionSpec]:
    """The attention of each layer."""
    rates = config.object("compress_rates") or Fields({}, config.source)
    rate_of = {
        SPARSE: config.integer("compress_rate_csa", default=rates.integer(SPARSE, default=4, minimum=1), minimum=1),
        HEAVY: config.integer("compress_rate_hca", default=rates.integer(HEAVY, default=128, minimum=1), minimum=1),
    }
    num_groups = config.integer("o_groups", default=8, minimum=1)
    if sizes.num_heads % num_groups:
        raise CheckpointError(
            f"{config.source}: o_groups ({num_groups}) must divide num_attention_heads ({sizes.num_heads})"
        )
    index_heads = config.integer("index_n_heads", default=64, minimum=1)
    index_size = config.integer("index_head_dim", default=128, minimum=1)
    rotated = int(sizes.head_dim * compressed.partial_rotary_factor)
    if index_size < rotated:
        raise CheckpointError(
            f"{config.source}: index_head_dim ({index_size}) must be at least the {rotated} dimensions that are rotated"
        )
    topk = config.integer("index_topk", default=512, minimum=1)
    window = WindowAttentionSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        rotary_dim=int(sizes.head_dim * main.partial_rotary_factor),
        rope=main,
        q_lora_rank=config.integer("q_lora_rank", default=1024, minimum=1),
        sliding_window=config.integer("sliding_window", default=128, minimum=1),
        num_groups=num_groups,
        group_rank=config.integer("o_lora_rank", default=1024, minimum=1),
        eps=sizes.eps,
    )
    shapes: list[EntryShape] = []
    attentions = []
    for kind in _kinds(config, sizes.num_layers):
        if kind == SLIDING:
            attentions.append(window)
            continue
        compressor = CompressorSpec(
            name="compressor",
            hidden_size=sizes.hidden_size,
            size=sizes.head_dim,
            rate=rate_of[kind],
            overlaps=kind == SPARSE,
            eps=sizes.eps,
        )
        index = None
        if kind == SPARSE:
            small = replace(compressor, name="compressor.indexer", size=index_size)
            index = EntryIndexSpec(compressor=small, num_heads=index_heads, topk=topk)
        fields: dict[str, Any] = {"compressor": compressor, "index": index, "first_shape": len(shapes)}
        own = replace(window, rope=compressed, rotary_dim=rotated, **fields)
        shapes += [EntryShape(each.size, each.rate) for each in own.compressors]
        attentions.append(own)
    entries = CompressedEntriesSpec(shapes=tuple(shapes))
    return [replace(attention, entries=entries) for attention in attentions]


def _moes(config: Fields, sizes: DecoderSizes) -> list[DeepseekV4MoESpec]:
    """The experts of each layer."""
    num_experts, per_token = expert_counts(config, "n_routed_experts", "num_experts_per_tok")
    config.fixed("scoring_func", "sqrtsoftplus")
    config.fixed("n_shared_experts", 1)
    fields: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "num_experts": num_experts,
        "intermediate_size": sizes.intermediate_size,
        "act": sizes.act,
        "limit": config.number("swiglu_limit", default=10.0, above=0.0),
        "routing": Routing(
            top_k=per_token,
            scoring="sqrtsoftplus",
            renormalize=True,
            minimum=LEAST_SCORES,
            scale=config.number("routed_scaling_factor", default=1.5),
        ),
        "shared": sizes.gated_mlp("mlp.shared_experts"),
    }
    num_hashed = config.integer("num_hash_layers", default=3, minimum=0)
    hashed = [layer < num_hashed for layer in sizes.layers]
    return [
        HashMoESpec(**fields, vocab_size=sizes.vocab_size)
        if is_hashed
        else DeepseekV4MoESpec(**fields, correction_bias="gate.e_score_correction_bias")
        for is_hashed in layer_kinds(config, "mlp_layer_types", sizes.num_layers, MOE_KINDS, hashed)
    ]
