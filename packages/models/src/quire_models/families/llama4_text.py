"""Llama 4's text model (Meta 2025): attention within chunks, between them layers without positions, and experts.

Queries of layers that know no positions grow with the logarithm of theirs (Nakanishi 2025, scalable softmax), so that
attention over long contexts does not fade."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.smollm3 import rotated_layers
from quire_models.feed_forward_spec import Routing, SparseMoESpec, StackedExperts
from quire_models.mixer_spec import QueryGrowthSpec
from quire_models.spec import NetworkSpec

__all__ = ["KINDS", "WeightedInputMoESpec", "spec"]

KINDS = {"chunked_attention": True, "full_attention": False}
"""Name of a layer's kind -> it attends within chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedInputMoESpec(SparseMoESpec):
    """A token's weights scale what its experts get, not what they give."""

    built_by: ClassVar[str] = "quire_models.families.llama4_text_layers:WeightedInputMoE"


def spec(config: Fields) -> NetworkSpec:
    """`intermediate_size` is that of an expert, `intermediate_size_mlp` that of layers without. Rotated queries and
    keys are normalised, without a weight."""
    sizes = decoder_sizes(
        config.named(intermediate_size="intermediate_size_mlp"), head_dim=128, theta=500000.0, eps=1e-5
    )
    bias = config.flag("attention_bias", default=False)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    inner = config.integer("intermediate_size", minimum=1)
    rotated = rotated_layers(config, sizes.num_layers)
    moe = WeightedInputMoESpec(
        name="feed_forward",
        hidden_size=sizes.hidden_size,
        num_experts=num_experts,
        intermediate_size=inner,
        act=sizes.act,
        routing=Routing(top_k=per_token, scoring="sigmoid"),
        router="router",
        stacked=StackedExperts(inputs_first=True),
        shared=sizes.gated_mlp("feed_forward.shared_expert", inner),
    )
    mlp, sparse = sizes.gated_mlp("feed_forward"), _sparse_layers(config, sizes.num_layers)
    norm = sizes.rms_norm("", sizes.head_dim, has_weight=False)
    norms = {"q_norm": norm, "k_norm": norm} if config.flag("use_qk_norm", default=True) else {}
    with_positions = sizes.attention(bias=bias, interleaved=True, norm_after_rotation=True, **norms)
    without = sizes.attention(bias=bias, interleaved=True, rope=None, query_growth=_growth(config, sizes))
    return sizes.network(
        sizes.pre_norm(
            layer,
            replace(with_positions if rotated[layer] else without, chunk_tokens=chunk),
            moe if sparse[layer] else mlp,
        )
        for layer, chunk in enumerate(_chunks(config, rotated))
    )


def _growth(config: Fields, sizes: DecoderSizes) -> QueryGrowthSpec | None:
    tuned = config.flag("attn_temperature_tuning", default=True)
    step = config.integer("floor_scale", default=8192, minimum=1)
    scale = config.number("attn_scale", default=0.1) if tuned else 0.0
    return QueryGrowthSpec(scale=scale, step=step, max_positions=sizes.max_model_len, offset=1) if scale else None


def _sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    listed = config.get("moe_layers")
    if listed is None:
        step = config.integer("interleave_moe_layer_step", default=1, minimum=1)
        listed = list(range(step - 1, layers, step))
    if not isinstance(listed, list) or any(layer not in range(layers) for layer in listed):
        raise CheckpointError(f"{config.source}: moe_layers must list some of {layers} layers, is {listed!r}")
    return tuple(layer in listed for layer in range(layers))


def _chunks(config: Fields, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    chunk = config.integer("attention_chunk_size", default=8192, minimum=1)
    kinds = layer_kinds(config, "layer_types", len(rotated), KINDS, rotated)
    return tuple(chunk if is_chunked else None for is_chunked in kinds)
