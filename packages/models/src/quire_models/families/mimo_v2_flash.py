"""MiMo-V2 (Xiaomi 2026): values narrower than keys, and scaled; layers with windows have sinks and key-value heads of
their own number; experts as in DeepSeek-V3, without shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.rope_config import RopeConfig, parse_rope
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, Weight, inside

__all__ = ["NarrowValueSpec", "spec"]

KINDS = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowValueSpec(SelfAttentionSpec):
    """Attention whose values have fewer dimensions than its keys; the cache keeps them with zeros behind."""

    value_dim: int
    value_factor: float
    """Of the values."""
    built_by: ClassVar[str] = "quire_models.families.mimo_v2_flash_layers:NarrowValueAttention"

    def projections(self) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
        """Queries, keys, values, output."""

        def linear(name: str, inputs: int, outputs: int, bias: bool) -> LinearSpec:
            return LinearSpec(name=name, in_features=inputs, out_features=outputs, bias=bias)

        names, hidden, bias = self.names, self.hidden_size, self.qkv_bias
        return (
            linear(names.query, hidden, self.query_size, bias),
            linear(names.key, hidden, self.kv_size, bias),
            linear(names.value, hidden, self.num_kv_heads * self.value_dim, bias),
            linear(names.out, self.num_heads * self.value_dim, hidden, self.out_bias),
        )

    def weights(self) -> Iterator[Weight]:
        """Projections and sinks."""
        for each in self.projections():
            yield from inside(self.name, each.weights("attention"))
        if self.sinks:
            yield Weight(f"{self.name}.sinks", (self.num_heads,), "attention")


def spec(config: Fields) -> NetworkSpec:
    """Names are those of Transformers' class, or as first published: `hybrid_layer_pattern`, `moe_layer_freq`,
    `swa_num_key_value_heads`, `swa_rope_theta`, `sliding_window_size`, which does not count the token itself."""
    config = config.with_default("routed_scaling_factor", 1.0)
    base = config.named(rope_parameters="-", partial_rotary_factor="-", rope_scaling="-", rope_theta="-")
    base = base.named(rms_norm_eps="layernorm_epsilon") if config.get("rms_norm_eps") is None else base
    sizes = decoder_sizes(base, head_dim=192, eps=1e-5)
    num = sizes.num_layers
    for name, known in (("add_swa_attention_sink_bias", True), ("add_full_attention_sink_bias", False)):
        config.fixed(name, known)
    pattern = config.get("hybrid_layer_pattern")
    slides = [bool(layer and (layer + 1) % 6) for layer in sizes.layers]
    slides = [kind == 1 for kind in pattern[:num]] if isinstance(pattern, list) else slides
    slides = list(layer_kinds(config, "layer_types", num, KINDS, slides))
    frequency = config.get("moe_layer_freq")
    sparse = [layer > 0 for layer in sizes.layers]
    sparse = [bool(each) for each in frequency[:num]] if isinstance(frequency, list) else sparse
    sparse = list(layer_kinds(config, "mlp_layer_types", num, MLP_KINDS, sparse))
    if len(slides) != num or len(sparse) != num:
        raise CheckpointError(
            f"{config.source}: hybrid_layer_pattern and moe_layer_freq must have a number for each of {num} layers"
        )
    attentions = [_attention(config, sizes, slides=each) for each in (False, True)]
    moe = grouped_moe(config.named(n_shared_experts="-"), sizes)
    network = grouped_network(config, sizes, [attentions[each] for each in slides], moe, sparse=sparse)
    names = CheckpointNames(
        ignored_prefixes=(*network.checkpoint.ignored_prefixes, "model.mtp."),
        renamed=((".self_attn.attention_sink_bias", ".self_attn.sinks"),),
    )
    return sizes.network(network.layers, checkpoint=names)


def _attention(config: Fields, sizes: DecoderSizes, *, slides: bool) -> NarrowValueSpec:
    """Of layers with a window, or of those without."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads * (2 if slides else 1)
    head_dim, value_dim = sizes.head_dim, config.integer("v_head_dim", default=128, minimum=1)
    window = config.integer("sliding_window", default=129, minimum=1)
    before = config.integer("sliding_window_size", default=window - 1, minimum=0)
    if slides:
        heads = config.integer("swa_num_attention_heads", default=heads, minimum=1)
        kv_heads = config.integer("swa_num_key_value_heads", default=kv_heads, minimum=1)
        head_dim = config.integer("swa_head_dim", default=head_dim, minimum=1)
        value_dim = config.integer("swa_v_head_dim", default=value_dim, minimum=1)
    if value_dim > head_dim:
        raise CheckpointError(f"{config.source}: v_head_dim ({value_dim}) must be at most head_dim ({head_dim})")
    rope = _rope(config, sizes, slides=slides)
    return NarrowValueSpec(
        hidden_size=sizes.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        rotary_dim=int(head_dim * rope.partial_rotary_factor),
        qkv_bias=config.flag("attention_bias", default=False),
        sinks=slides,
        sliding_window=before + 1 if slides else None,
        value_dim=value_dim,
        value_factor=config.number("attention_value_scale", default=1.0),
    )


def _rope(config: Fields, sizes: DecoderSizes, *, slides: bool) -> RopeConfig:
    kind, context = "sliding_attention" if slides else "full_attention", sizes.max_model_len
    if isinstance((config.get("rope_parameters") or {}).get(kind), dict):
        return parse_rope(config, max_position_embeddings=context, layers=kind)
    values: dict[str, Any] = {
        "rope_theta": config.get("swa_rope_theta" if slides else "rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        "rope_scaling": None if slides else config.get("rope_scaling"),
    }
    plain = Fields(values, config.source)
    return parse_rope(plain, max_position_embeddings=context, theta=1e4 if slides else 5e6, partial=0.334)
