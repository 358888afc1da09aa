"""Step 3.5 (StepFun 2026): gates of heads, more query heads in layers with windows, and experts whose inner numbers are
kept within limits in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.muse_glimmer import OutputGatedSpec
from quire_models.feed_forward_spec import GatedMLPSpec, Routing, SparseMoESpec, StackedExperts
from quire_models.rope_config import RopeConfig, parse_rope
from quire_models.spec import CheckpointNames, FeedForwardSpec, NetworkSpec, NormSpec

__all__ = ["LimitedMLPSpec", "LimitedMoESpec", "spec"]

KINDS = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMLPSpec(GatedMLPSpec):
    """down(min(act(gate(x)), c) * clamp(up(x), -c, c))."""

    limit: float
    """c."""
    built_by: ClassVar[str] = "quire_models.families.step3p5_layers:LimitedMLP"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMoESpec(SparseMoESpec):
    """Experts with such a limit, which is the record's `limit`; none for 0. The shared network has one of its own."""

    built_by: ClassVar[str] = "quire_models.families.step3p5_layers:LimitedMoE"


def spec(config: Fields) -> NetworkSpec:
    """Lists of layers may go on behind the last one, with those that predict further tokens."""
    for name, first in _FIRST_NAMES.items():
        config = config.with_default(name, config.get(first))
    config.fixed("use_bidirectional_attention", False)
    plain = config.named(rope_theta="-", rope_scaling="-", partial_rotary_factor="-", rope_parameters="-")
    sizes = decoder_sizes(plain, head_dim=128, eps=1e-5)
    num = sizes.num_layers
    num_mtp = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    slides = layer_kinds(_cut(config, "layer_types", num), "layer_types", num, KINDS, [False] * num)
    window = config.integer("sliding_window", default=None, minimum=1)
    other = Fields(config.get("attention_other_setting") or {}, f"{config.source}: attention_other_setting")
    heads = config.integer(
        "num_sliding_attention_heads", default=other.integer("num_attention_heads", default=sizes.num_heads), minimum=1
    )
    ropes = [_rope(config, sizes, layer, slides[layer]) for layer in sizes.layers]

    def attention(layer: int) -> OutputGatedSpec:
        rope = ropes[layer]
        return OutputGatedSpec(
            hidden_size=sizes.hidden_size,
            num_heads=heads if slides[layer] else sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=config.number("query_pre_attn_scalar", default=float(sizes.head_dim), above=0.0) ** -0.5,
            rope=rope,
            rotary_dim=int(sizes.head_dim * rope.partial_rotary_factor),
            qkv_bias=(bias := config.flag("attention_bias", default=False)),
            out_bias=bias,
            sliding_window=window if slides[layer] else None,
            **sizes.head_norms(offset=1.0),
            gate_name="g_proj",
            per_head=True,
        )

    def norm(name: str) -> NormSpec:
        return sizes.rms_norm(name, offset=1.0)

    extra = range(num, num + num_mtp)
    return sizes.network(
        (
            sizes.pre_norm(layer, attention(layer), feed_forward, norm=norm)
            for layer, feed_forward in enumerate(_feed_forwards(config, sizes))
        ),
        final_norm=norm("norm"),
        checkpoint=CheckpointNames(ignored_prefixes=tuple(f"model.layers.{layer}." for layer in extra)),
    )


_FIRST_NAMES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "max_position_embeddings": "max_seq_len",
}
"""Field -> what config.json calls it as first published."""


def _cut(config: Fields, name: str, layers: int) -> Fields:
    """A list of layers without what it says of those behind the last one."""
    listed = config.get(name)
    return Fields({name: listed[:layers] if isinstance(listed, list) else listed}, config.source)


def _number_of(config: Fields, name: str, layer: int, default: float) -> float:
    """What a field says of a layer: a list of numbers, one for all layers, or nothing."""
    value = config.get(name)
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise CheckpointError(f"{config.source}: {name} must have numbers, has {value!r} for layer {layer}")
    return default if value is None else float(value)


def _rope(config: Fields, sizes: DecoderSizes, layer: int, slides: bool) -> RopeConfig:
    """The rotation of a layer: scaled in those of full attention, in others where `yarn_only_types` says so."""
    context, kind = sizes.max_model_len, "sliding_attention" if slides else "full_attention"
    if isinstance((config.get("rope_parameters") or {}).get(kind), Mapping):
        return parse_rope(config, max_position_embeddings=context, layers=kind)
    scaled = config.get("rope_scaling")
    only = config.get("yarn_only_types") or ["full_attention"]
    values: dict[str, Any] = {
        "rope_theta": _number_of(config, "rope_theta", layer, 10000.0),
        "partial_rotary_factor": _number_of(config, "partial_rotary_factors", layer, 1.0),
        "rope_scaling": scaled if kind in only else None,
    }
    return parse_rope(Fields(values, config.source), max_position_embeddings=context)


def _feed_forwards(config: Fields, sizes: DecoderSizes) -> list[FeedForwardSpec]:
    num = sizes.num_layers
    num_experts, per_token = expert_counts(config, "n_routed_experts", "num_experts_per_tok")
    shared = config.integer("share_expert_dim", default=1280, minimum=1)
    routing = Routing(
        top_k=per_token,
        scoring="sigmoid",
        renormalize=True,
        scale=config.number("moe_router_scaling_factor", default=1.0),
    )
    config.fixed("moe_router_activation", "sigmoid")
    config.fixed("mlp_bias", False)
    parts: list[FeedForwardSpec] = []
    for layer, is_sparse in enumerate(_sparse_layers(config, num)):
        of_shared = _number_of(config, "swiglu_limits_shared", layer, 0.0)
        if not is_sparse:
            parts.append(_limited(sizes.gated_mlp(), of_shared))
            continue
        limit = _number_of(config, "swiglu_limits", layer, 0.0)
        parts.append(
            (LimitedMoESpec if limit or of_shared else SparseMoESpec)(
                name="moe",
                hidden_size=sizes.hidden_size,
                num_experts=num_experts,
                intermediate_size=config.integer("moe_intermediate_size", default=1280, minimum=1),
                act=sizes.act,
                limit=limit,
                routing=routing,
                stacked=StackedExperts(names=("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
                correction_bias="router_bias",
                shared=_limited(sizes.gated_mlp("share_expert", shared), of_shared),
            )
        )
    return parts


def _limited(mlp: GatedMLPSpec, limit: float) -> GatedMLPSpec:
    if not limit:
        return mlp
    return LimitedMLPSpec(
        name=mlp.name,
        hidden_size=mlp.hidden_size,
        intermediate_size=mlp.intermediate_size,
        act=mlp.act,
        limit=limit,
    )


def _sparse_layers(config: Fields, layers: int) -> list[bool]:
    """Per layer, from `mlp_layer_types` or the numbers in `moe_layers_enum`: whether it has experts."""
    if config.get("mlp_layer_types") is not None:
        kinds = {"dense": False, "sparse": True}
        return list(layer_kinds(_cut(config, "mlp_layer_types", layers), "mlp_layer_types", layers, kinds))
    listed = config.get("moe_layers_enum")
    parts = listed.split(",") if isinstance(listed, str) else range(3, layers) if listed is None else listed
    try:
        sparse = {int(part) for part in parts if str(part).strip()}
    except (TypeError, ValueError):
        raise CheckpointError(f"{config.source}: moe_layers_enum must list layers, as '3,4,5', is {listed!r}") from None
    return [layer in sparse for layer in range(layers)]
