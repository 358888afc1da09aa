"""Inkling 2 (Thinking Machines 2026): Inkling with gates, sinks and clipped heads in its attention, filters that each
token brings itself in layers without a window, experts whose inner numbers are capped, and parts that read a mixture of
what blocks of layers gave (attention residuals) in the place of one residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.inkling import (
    LAYER_KINDS,
    PUBLISHED,
    TABLES,
    LayerConvolutionsSpec,
    RelativeAttentionSpec,
    windowed_heads,
)
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import (
    CheckpointNames,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    NetworkSpec,
    NormSpec,
    StateInputs,
    Weight,
    inside,
    recast,
)

__all__ = [
    "AttentionResidualNetworkSpec",
    "CappedMoESpec",
    "ClippedAttentionSpec",
    "Inkling2ConvolutionsSpec",
    "Inkling2LayerSpec",
    "spec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedAttentionSpec(RelativeAttentionSpec):
    """Such attention whose queries, keys and mixing numbers have a largest length, whose values are normed, and whose
    tokens bring gates and sinks."""

    clip_length: float
    """Of a query, and of a key."""
    relative_clip_length: float
    """Of the numbers by which a head mixes the profiles."""
    eps: float
    """Of the norm of values."""
    built_by: ClassVar[str] = "quire_models.families.inkling2_layers:ClippedAttention"

    @property
    def width(self) -> int:
        """That of Inkling's, and clipped numbers in float32, gates and sinks."""
        own: int = RelativeAttentionSpec.width.__get__(self)
        return own + 2 * (2 * self.query_size + self.num_heads * (self.relative_size + 1))

    def beside_queries(self) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """What else takes the queries' input: mixing numbers, gates, sinks."""
        gate, sinks = (
            LinearSpec(name=name, in_features=self.hidden_size, out_features=size)
            for name, size in (("gate_proj", self.query_size), ("sink_proj", self.num_heads))
        )
        return self.relative(), gate, sinks

    def weights(self) -> Iterator[Weight]:
        """Those of attention, what else tokens bring, factors before the clips, and the profiles."""
        yield from SelfAttentionSpec.weights(self)
        for linear in self.beside_queries():
            yield from inside(self.name, linear.weights("attention"))
        yield Weight(f"{self.name}.q_l2_clip.scale", (self.num_heads, self.head_dim), "attention")
        yield Weight(f"{self.name}.rel_l2_clip.scale", (self.num_heads, self.relative_size), "attention")
        yield Weight(f"{self.name}.rel_logits_proj.proj", (self.relative_size, self.extent), "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inkling2ConvolutionsSpec(LayerConvolutionsSpec):
    """The short convolutions of a layer, with factors that keep their size."""

    num_dynamic_heads: int
    """Key-value heads whose filters each token brings in part; 0 where filters are fixed."""

    @property
    def state_inputs(self) -> StateInputs:
        """All inputs, and the filters of keys and values, in float32."""
        own: StateInputs = LayerConvolutionsSpec.state_inputs.__get__(self)
        return own._replace(wide=own.wide + 2 * self.num_dynamic_heads * self.taps)

    def weights(self) -> Iterator[Weight]:
        """A filter for each channel, kept in float32, and what makes those of a token."""
        part, size, hidden = "convolution", self.kv_size, self.hidden_size
        for name in ("self_attn.k_sconv", "self_attn.v_sconv"):
            if self.num_dynamic_heads:
                yield Weight(f"{name}.static_w", (self.taps, size), part, is_wide=True)
                yield Weight(f"{name}.weight_proj", (self.num_dynamic_heads * self.taps, hidden), part)
            else:
                yield Weight(f"{name}.weight", (size, 1, self.taps), part, is_wide=True)
        for name in ("attn_sconv", "mlp_sconv"):
            yield Weight(f"{name}.weight", (hidden, 1, self.taps), part, is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedMoESpec(SparseMoESpec):
    """Experts that give cap(gate(x), c) * sigmoid(gate(x)) * cap(up(x), d), where cap(y, c) is c * tanh(y / c)."""

    gate_cap: float
    """c."""
    up_cap: float
    """d."""
    built_by: ClassVar[str] = "quire_models.families.inkling2_layers:CappedMoE"

    def weights(self) -> Iterator[Weight]:
        """Those of experts; the router's weight is kept in float32."""
        router = f"{self.name}.{self.router}.weight"
        for weight in SparseMoESpec.weights(self):
            yield weight._replace(is_wide=True) if weight.name == router else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Inkling2LayerSpec(LayerSpec):
    """Two parts, each of which reads a mixture of what earlier blocks of layers gave and of the sum of its own block;
    its mixers are the attention, and the convolutions."""

    begins_block: bool
    """The sum of the block before ends with what this layer takes."""
    num_mixtures: int
    """What its attention reads: one mixture, or one each for queries, keys and values; 0 in the first layer."""
    key_norm: NormSpec | None = None
    value_norm: NormSpec | None = None
    """Where keys and values read mixtures of their own; `input_norm` is of the queries then."""
    built_by: ClassVar[str] = "quire_models.families.inkling2_layers:Inkling2Layer"

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Its norms."""
        norms = (self.input_norm, self.key_norm, self.value_norm, self.feed_forward_norm)
        return tuple(norm for norm in norms if norm is not None)

    def weights(self) -> Iterator[Weight]:
        """Parameters of all parts, and of the mixtures."""
        yield from LayerSpec.weights(self)
        for name, count in (("attention_input", self.num_mixtures), ("mlp_input", 1)):
            if count:
                yield _query(f"{self.name}.{name}", count, self.mixers[0].hidden_size)  # type: ignore[attr-defined]  # attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResidualNetworkSpec(NetworkSpec):
    """A network of such layers, whose last norm reads a mixture, too."""

    built_by: ClassVar[str] = "quire_models.families.inkling2_layers:AttentionResidualLM"

    @property
    def inner_width(self) -> int:
        """The sums of all blocks, and twice in float32 while they are mixed, beside what a part keeps."""
        width: int = NetworkSpec.inner_width.__get__(self)
        sums = 1 + sum(layer.begins_block for layer in self.layers if isinstance(layer, Inkling2LayerSpec))
        return width + 5 * sums * self.hidden_size

    def weights(self) -> Iterator[Weight]:
        """Those of the network, and of the mixture behind the last layer."""
        yield from NetworkSpec.weights(self)
        yield _query(f"{self.body}.final_input", 1, self.hidden_size)


def _query(name: str, count: int, size: int) -> Weight:
    return Weight(f"{name}.query", (size,) if count == 1 else (count, size), "norms", is_wide=True)


def spec(config: Fields) -> NetworkSpec:
    """Names are those of Transformers' class, or of the published checkpoints (`sconv_kernel_size`,
    `model_max_length`, `intermediate_size`, `routed_scaling_factor`)."""
    config.fixed("scoring_func", "sigmoid")
    config = config.with_default("moe_intermediate_size", config.get("intermediate_size"))
    config = config.with_default("conv_kernel_size", config.get("sconv_kernel_size"))
    config = config.with_default("route_scale", config.get("routed_scaling_factor"))
    if config.get("model_max_length") is not None:
        config = config.named(max_position_embeddings="model_max_length")
    inner = config.integer("moe_intermediate_size", default=2304, minimum=1)
    sized = config.with_default("intermediate_size", inner)
    sizes = decoder_sizes(sized, rotary=False, head_dim=128, context=1048576)
    # Rows of both tables behind the last token only pad them.
    num_tokens = config.integer("unpadded_vocab_size", default=200058, minimum=1)
    sizes = replace(sizes, vocab_size=min(sizes.vocab_size, num_tokens))
    taps = config.integer("conv_kernel_size", default=4, minimum=2)
    default = [bool((layer + 1) % 6) for layer in sizes.layers]
    slides = layer_kinds(config, "layer_types", sizes.num_layers, LAYER_KINDS, default)
    period = config.integer("n_layers_per_attn_res_block", default=6, minimum=1)
    attentions = [_attention(config, sizes, slides=each) for each in (False, True)]
    moe = _moe(config, sizes, inner)

    def layer_of(layer: int) -> Inkling2LayerSpec:
        attention, is_split = attentions[slides[layer]], not slides[layer]
        convolutions = Inkling2ConvolutionsSpec(
            hidden_size=sizes.hidden_size,
            kv_size=attention.kv_size,
            taps=taps,
            num_dynamic_heads=attention.num_kv_heads if is_split else 0,
        )
        return Inkling2LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(attention, convolutions),
            feed_forward=moe,
            input_norm=sizes.rms_norm("q_input_layernorm" if is_split else "input_layernorm"),
            key_norm=sizes.rms_norm("k_input_layernorm") if is_split else None,
            value_norm=sizes.rms_norm("v_input_layernorm") if is_split else None,
            feed_forward_norm=sizes.rms_norm("post_attention_layernorm"),
            begins_block=layer % period == 0,
            num_mixtures=0 if layer == 0 else 3 if is_split else 1,
        )

    return sizes.network(
        map(layer_of, sizes.layers),
        kind=AttentionResidualNetworkSpec,
        embedding=sizes.embedding(norm=sizes.rms_norm("embed_tokens.embed_norm"), norms_media=False),
        head=HeadSpec(soft_cap=config.number("final_logit_softcapping", default=30.0, above=0.0)),
        checkpoint=CheckpointNames(
            renamed=_renamed(sizes.num_layers),
            first_rows=tuple((name, sizes.vocab_size) for name in TABLES),
        ),
        caches_by_mixer=True,
    )


def _renamed(layers: int) -> tuple[tuple[str, str], ...]:
    """Names in the published checkpoints, which Transformers writes, too -> the network's: those of its class, but for
    convolutions."""
    queries = [("attn_res.output_query", "final_input.query")]
    for layer in reversed(range(layers)):  # or 1 would be found in 10
        queries.append((f"attn_res.attn_queries.{layer}", f"layers.{layer + 1}.attention_input.query"))
        queries.append((f"attn_res.mlp_queries.{layer}", f"layers.{layer}.mlp_input.query"))
    return (
        ("model.llm.", "model."),
        *PUBLISHED,
        (".attn.gate_attn.", ".self_attn.gate_proj."),
        (".attn.attn_sink_proj.", ".self_attn.sink_proj."),
        (".attn.", ".self_attn."),
        ("q_input_norm.", "q_input_layernorm."),
        ("k_input_norm.", "k_input_layernorm."),
        ("v_input_norm.", "v_input_layernorm."),
        *queries,
    )


def _attention(config: Fields, sizes: DecoderSizes, *, slides: bool) -> ClippedAttentionSpec:
    """Of layers with a window, or of those without."""
    own, window = windowed_heads(config, sizes, (48, 8, 1024)) if slides else (sizes, None)
    floor = config.number("log_scaling_n_floor", default=128000.0, above=0.0)
    return recast(
        ClippedAttentionSpec,
        own.attention(sliding_window=window),
        relative_size=config.integer("d_rel", default=16, minimum=1),
        extent=window or config.integer("rel_extent", default=1024, minimum=1),
        growth_floor=None if slides else floor,
        growth_scale=config.number("log_scaling_alpha", default=0.1),
        clip_length=config.number("qk_l2_clip_threshold", default=512**0.5, above=0.0),
        relative_clip_length=config.number("rel_l2_clip_threshold", default=8.0, above=0.0),
        eps=sizes.eps,
    )


def _moe(config: Fields, sizes: DecoderSizes, inner: int) -> CappedMoESpec:
    known = config.with_default("n_routed_experts", 384).with_default("num_experts_per_tok", 8)
    num, per_token = expert_counts(known, "n_routed_experts", "num_experts_per_tok")
    return CappedMoESpec(
        hidden_size=sizes.hidden_size,
        num_experts=num,
        intermediate_size=inner,
        act=sizes.act,
        routing=Routing(
            top_k=per_token, scoring="sigmoid", renormalize=True, scale=config.number("route_scale", default=8.0)
        ),
        stacked=None,
        correction_bias="gate.e_score_correction_bias",
        gate_cap=config.number("mlp_gate_softcap", default=4.0, above=0.0),
        up_cap=config.number("mlp_up_softcap", default=25.0, above=0.0),
    )
