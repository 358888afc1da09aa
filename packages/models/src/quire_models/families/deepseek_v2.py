"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts chosen by a softmax in groups, beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.mixer_spec import LatentSelfAttentionSpec
from quire_models.spec import NetworkSpec

__all__ = ["latent_attention", "spec", "spec_of_v3", "whole_rotations"]


def spec(config: Fields) -> NetworkSpec:
    """Experts are the most probable ones, of the groups whose best is best, or of all."""
    config.fixed("topk_method", "greedy", "group_limited_greedy")
    config.fixed("scoring_func", "softmax")
    config.fixed("norm_topk_prob", False)
    config.fixed("moe_layer_freq", 1)
    if config.text("topk_method", default="greedy") == "greedy":
        config = config.named(n_group="-", topk_group="-")
    sizes, attention = latent_attention(config)
    moe = grouped_moe(config, sizes, renormalize=False, correction_bias="")
    moe = replace(moe, routing=replace(moe.routing, scoring="softmax", renormalize=False, minimum=0.0, group_best=1))
    return grouped_network(config, sizes, [attention] * sizes.num_layers, moe)


def spec_of_v3(config: Fields) -> NetworkSpec:
    """DeepSeek-V3, R1 (DeepSeek-AI 2024) and Kimi K2: experts are scored by sigmoids, and chosen with a bias (sec.
    2.1)."""
    config.fixed("topk_method", "noaux_tc")
    config.fixed("scoring_func", "sigmoid")
    config.fixed("moe_layer_freq", 1)
    sizes, attention = latent_attention(config)
    moe = grouped_moe(config, sizes)
    return grouped_network(config, sizes, [attention] * sizes.num_layers, moe, dense_layers=3)


def latent_attention(config: Fields) -> tuple[DecoderSizes, LatentSelfAttentionSpec]:
    """The sizes of a decoder with latent attention, and that attention."""
    rope_dim = config.integer("qk_rope_head_dim", minimum=2)
    sizes = decoder_sizes(config.named(head_dim="qk_rope_head_dim"))
    rank, nope = config.integer("kv_lora_rank", minimum=1), config.integer("qk_nope_head_dim", minimum=1)
    assert sizes.rope is not None
    attention = LatentSelfAttentionSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        q_lora_rank=config.integer("q_lora_rank", default=None, minimum=1),
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        rotary_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim", minimum=1),
        scale=(nope + rope_dim) ** -0.5 * _length_scale(config) ** 2,
        rope=sizes.rope,
        interleaved=config.flag("rope_interleave", default=True),
        bias=config.flag("attention_bias", default=False),
    )
    return sizes, attention


def whole_rotations(config: Fields) -> Fields:
    """For latent attention without the share of a head that is rotated, which `qk_rope_head_dim` says."""
    spelled = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = Fields(config.get(spelled) or {}, f"{config.source}: {spelled}")
    kept = {name: rope.get(name) for name in config.get(spelled) or {} if name != "partial_rotary_factor"}
    whole = f"{spelled} of qk_rope_head_dim"
    return config.named(**{"partial_rotary_factor": "-", spelled: whole}).with_default(spelled, kept or None)


def _length_scale(config: Fields) -> float:
    """What scaled contexts add to the scores, for queries and keys each (DeepSeek-AI 2024, sec. 3.1.4)."""
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = Fields(raw, f"{config.source}: rope_scaling")
    weight = rope.number("mscale_all_dim", default=0.0)
    factor = rope.number("factor", default=1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1.0 and kind != "default" else 1.0
