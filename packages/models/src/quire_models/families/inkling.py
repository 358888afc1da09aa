"""Inkling (Thinking Machines 2026): attention without positions but with biases by distance that each token mixes for
itself, short convolutions over keys, values and what both parts of a layer give, and shared experts that the router
weighs beside the chosen ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.feed_forward_spec import GatedMLPSpec, Routing, SparseMoESpec
from quire_models.mixer_spec import RecurrentSpec, SelfAttentionSpec
from quire_models.spec import (
    CheckpointNames,
    FeedForwardSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    NetworkSpec,
    StateInputs,
    Weight,
    inside,
    recast,
)

__all__ = [
    "LAYER_KINDS",
    "PUBLISHED",
    "TABLES",
    "InklingLayerSpec",
    "LayerConvolutionsSpec",
    "RelativeAttentionSpec",
    "ScaledMLPSpec",
    "SharedSinkMoESpec",
    "spec",
    "windowed_heads",
]

LAYER_KINDS = {"hybrid": False, "hybrid_sliding": True}
"""Name of a layer's kind -> its attention has a window."""
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""Those with a row for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttentionSpec(SelfAttentionSpec):
    """Attention whose scores have biases by distance, mixed from profiles by each token."""

    relative_size: int
    """Numbers by which a head of a token mixes the profiles."""
    extent: int
    """Distances that have a bias: from 0 to below it."""
    growth_floor: float | None
    """Queries and biases grow with the logarithm of the position from here on; None for no growth."""
    growth_scale: float
    built_by: ClassVar[str] = "quire_models.families.inkling_layers:RelativeAttention"
    score_copies: ClassVar[int] = 4

    def relative(self) -> LinearSpec:
        """From x to the numbers that mix the profiles, of each head."""
        outputs = self.num_heads * self.relative_size
        return LinearSpec(name="r_proj", in_features=self.hidden_size, out_features=outputs)

    @property
    def width(self) -> int:
        """What mixes the profiles, and keys and values before and behind their convolutions, in float32."""
        return self.num_heads * self.relative_size + 2 * 6 * self.kv_size

    def weights(self) -> Iterator[Weight]:
        """Those of attention, what mixes the profiles, and the profiles."""
        yield from SelfAttentionSpec.weights(self)
        yield from inside(self.name, self.relative().weights("attention"))
        yield Weight(f"{self.name}.rel_logits_proj.proj", (self.relative_size, self.extent), "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConvolutionsSpec(RecurrentSpec):
    """The short convolutions of a layer, each added to what it takes: over keys, values, what attention gives and what
    the feed-forward network gives."""

    name: str = "convolutions"
    """Of their cache; weights stand in the layer."""
    hidden_size: int
    kv_size: int
    taps: int

    @property
    def width(self) -> int:
        """What a part gives, before and behind its convolution, in float32."""
        return 2 * 3 * self.hidden_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of keys and values, and of both parts."""
        past = self.taps - 1
        return (
            StateTensor("keys and values", (past, 2 * self.kv_size), "float32"),
            StateTensor("attention", (past, self.hidden_size), "float32"),
            StateTensor("feed-forward", (past, self.hidden_size), "float32"),
        )

    @property
    def state_inputs(self) -> StateInputs:
        """All inputs, in float32."""
        return StateInputs(0, wide=2 * self.kv_size + 2 * self.hidden_size)

    def weights(self) -> Iterator[Weight]:
        """A filter for each channel, kept in float32."""
        channels = {"self_attn.k_sconv": self.kv_size, "self_attn.v_sconv": self.kv_size}
        channels |= {"attn_sconv": self.hidden_size, "mlp_sconv": self.hidden_size}
        for name, size in channels.items():
            yield Weight(f"{name}.conv1d.weight", (size, 1, self.taps), "convolution", is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingLayerSpec(LayerSpec):
    """x + conv(attention(norm(x))), then x + conv(feed_forward(norm(x))), where conv adds a convolution of its input;
    its mixers are the attention, and the convolutions."""

    built_by: ClassVar[str] = "quire_models.families.inkling_layers:InklingLayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMLPSpec(GatedMLPSpec):
    """A gated network whose result has a learned factor."""

    built_by: ClassVar[str] = "quire_models.families.inkling_layers:ScaledMLP"

    def weights(self) -> Iterator[Weight]:
        """Those of the network, and the factor."""
        yield from GatedMLPSpec.weights(self)
        yield Weight(f"{self.name}.global_scale", (1,), "MLP")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSinkMoESpec(SparseMoESpec):
    """Experts of which the last ones are chosen by every token, and weighed by the router all the same. `num_experts`
    and `routing.top_k` count these, too."""

    num_shared: int
    built_by: ClassVar[str] = "quire_models.families.inkling_layers:SharedSinkMoE"

    @property
    def num_routed(self) -> int:
        """Experts that the router chooses among."""
        return self.num_experts - self.num_shared

    @property
    def num_chosen(self) -> int:
        """Those of a token that are not shared."""
        return self.routing.top_k - self.num_shared

    def weights(self) -> Iterator[Weight]:
        """Those of the experts, and of the router its factor and the bias of its choice."""
        yield from SparseMoESpec.weights(self)
        yield Weight(f"{self.name}.gate.global_scale", (1,), "experts", is_wide=True)
        bias = f"{self.name}.gate.e_score_correction_bias"
        yield Weight(bias, (self.num_routed,), "experts", is_wide=True, is_buffer=True)


def spec(config: Fields) -> NetworkSpec:
    """Names are those of Transformers' class, or of the published checkpoints (`local_layer_ids`, `dense_mlp_idx`,
    `dense_intermediate_size`, `sconv_kernel_size`, `model_max_length`)."""
    config.fixed("shared_expert_sink", True)
    config.skip("rms_norm_eps_moe_gate", "mtp_*", "num_mtp_layers", "chain_hidden_post_norm")  # nothing reads them
    if config.get("dense_intermediate_size") is not None:
        config = config.named(moe_intermediate_size="intermediate_size", intermediate_size="dense_intermediate_size")
    config = config.with_default("conv_kernel_size", config.get("sconv_kernel_size"))
    if config.get("model_max_length") is not None:
        config = config.named(max_position_embeddings="model_max_length")
    sizes = decoder_sizes(config, rotary=False, head_dim=128, context=131072)
    table = sizes.vocab_size
    # Rows of both tables behind the last token only pad them.
    sizes = replace(sizes, vocab_size=min(table, config.integer("unpadded_vocab_size", default=table, minimum=1)))
    num, taps = sizes.num_layers, config.integer("conv_kernel_size", default=4, minimum=2)
    local = config.get("local_layer_ids")
    if local is not None and not isinstance(local, list):
        raise CheckpointError(f"{config.source}: local_layer_ids must be a list of layers, is {local!r}")
    slides = [bool((layer + 1) % 6) if local is None else layer in local for layer in sizes.layers]
    slides = list(layer_kinds(config, "layer_types", num, LAYER_KINDS, slides))
    dense = config.integer("dense_mlp_idx", default=0, minimum=0)
    sparse = layer_kinds(config, "mlp_layer_types", num, MLP_KINDS, [layer >= dense for layer in sizes.layers])
    attentions = [_attention(config, sizes, slides=each) for each in (False, True)]
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    mlp = ScaledMLPSpec(hidden_size=hidden, intermediate_size=inner, act=sizes.act)
    moe = _moe(config, sizes) if any(sparse) else None

    def layer_of(layer: int) -> InklingLayerSpec:
        attention = attentions[slides[layer]]
        feed_forward: FeedForwardSpec | None = moe if sparse[layer] else mlp
        return InklingLayerSpec(
            name=f"model.layers.{layer}",
            mixers=(attention, LayerConvolutionsSpec(hidden_size=hidden, kv_size=attention.kv_size, taps=taps)),
            feed_forward=feed_forward,
            input_norm=sizes.rms_norm("input_layernorm"),
            feed_forward_norm=sizes.rms_norm("post_attention_layernorm"),
        )

    return sizes.network(
        map(layer_of, sizes.layers),
        embedding=sizes.embedding(norm=sizes.rms_norm("embed_tokens.embed_norm"), norms_media=False),
        head=HeadSpec(factor=1 / config.number("logits_mup_width_multiplier", default=24.0, above=0.0)),
        checkpoint=CheckpointNames(
            ignored_prefixes=("model.mtp.",),
            renamed=(
                *PUBLISHED,
                (".attn.", ".self_attn."),
                ("_sconv.weight", "_sconv.conv1d.weight"),
                (".mlp.w2_md.", ".mlp.down_proj."),
            ),
            first_rows=tuple((name, sizes.vocab_size) for name in TABLES),
        ),
        caches_by_mixer=True,
    )


PUBLISHED = (
    ("model.embed.", "model.embed_tokens."),
    ("model.embed_norm.", "model.embed_tokens.embed_norm."),
    ("model.unembed.", "lm_head."),
    (".attn.wq_du.", ".self_attn.q_proj."),
    (".attn.wk_dv.", ".self_attn.k_proj."),
    (".attn.wv_dv.", ".self_attn.v_proj."),
    (".attn.wr_du.", ".self_attn.r_proj."),
    (".attn.wo_ud.", ".self_attn.o_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".mlp.gate.bias", ".mlp.gate.e_score_correction_bias"),
)
"""Names in the published checkpoints -> those of Transformers' class."""


def windowed_heads(config: Fields, sizes: DecoderSizes, defaults: tuple[int, int, int]) -> tuple[DecoderSizes, int]:
    """Sizes with the heads of layers that have a window, and the window.

    Args:
        defaults: The class's own of query heads, key-value heads, and window.
    """
    heads = config.integer("swa_num_attention_heads", default=defaults[0], minimum=1)
    kv_heads = config.integer("swa_num_key_value_heads", default=defaults[1], minimum=1)
    head_dim = config.integer("swa_head_dim", default=128, minimum=1)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.source}: swa_num_attention_heads ({heads}) must be a multiple of swa_num_key_value_heads "
            f"({kv_heads})"
        )
    window = config.integer("sliding_window_size", default=defaults[2], minimum=1)
    return replace(sizes, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim), window


def _attention(config: Fields, sizes: DecoderSizes, *, slides: bool) -> RelativeAttentionSpec:
    """Of layers with a window, or of those without."""
    own, window = windowed_heads(config, sizes, (64, 16, 512)) if slides else (sizes, None)
    floor = config.number("log_scaling_n_floor", default=None, above=0.0)
    return recast(
        RelativeAttentionSpec,
        own.attention(scale=1 / own.head_dim, sliding_window=window, **own.head_norms()),
        relative_size=config.integer("d_rel", default=16, minimum=1),
        extent=window or config.integer("rel_extent", default=1024, minimum=1),
        growth_floor=None if slides else floor,
        growth_scale=config.number("log_scaling_alpha", default=0.1),
    )


def _moe(config: Fields, sizes: DecoderSizes) -> SharedSinkMoESpec:
    known = config.with_default("n_routed_experts", 256).with_default("num_experts_per_tok", 6)
    routed, per_token = expert_counts(known, "n_routed_experts", "num_experts_per_tok")
    shared = config.integer("n_shared_experts", default=2, minimum=1)
    return SharedSinkMoESpec(
        hidden_size=sizes.hidden_size,
        num_experts=routed + shared,
        intermediate_size=config.integer("moe_intermediate_size", default=3072, minimum=1),
        act=sizes.act,
        routing=Routing(
            top_k=per_token + shared,
            scoring="sigmoid",
            renormalize=True,
            scale=config.number("route_scale", default=8.0),
        ),
        stacked=None,
        num_shared=shared,
    )
