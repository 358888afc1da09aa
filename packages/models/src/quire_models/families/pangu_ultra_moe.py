"""openPangu Ultra MoE (Huawei 2025, arXiv:2505.04519): latent attention and experts as in DeepSeek-V3, with
norms before and behind each part."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.glm4_moe import grouped_moe
from quire_models.spec import CheckpointNames, MixerSpec, NetworkSpec

__all__ = ["pangu_network", "spec"]

_FIRST_NAMES = {
    "kv_lora_rank": "attention_kv_lora_dim",
    "q_lora_rank": "attention_q_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Field -> what config.json calls it as first published."""


def spec(config: Fields) -> NetworkSpec:
    """Latent attention in every layer."""
    for name, first in _FIRST_NAMES.items():
        config = config.with_default(name, config.get(first))
    config.fixed("param_sink_number", 0)
    return pangu_network(config, *latent_attention(config))


def pangu_network(config: Fields, sizes: DecoderSizes, attention: MixerSpec) -> NetworkSpec:
    """Experts are chosen of all of them. Without `sandwich_norm` there are norms before the parts only.

    Args:
        attention: Of every layer.
    """
    has_bias = config.flag("router_enable_expert_bias", default=False)
    named = config.named(n_group="-", topk_group="-")
    moe = grouped_moe(named, sizes, correction_bias="gate.e_score_correction_bias" if has_bias else "")
    dense = config.integer("first_k_dense_replace", default=sizes.num_layers, minimum=0)
    norms, behind = ("input_layernorm", "post_attention_layernorm"), dict[str, Any]()
    if config.flag("sandwich_norm", default=False):
        norms = ("input_layernorm", "pre_mlp_layernorm")
        behind = {
            "attention_out_norm": sizes.rms_norm("post_attention_layernorm"),
            "feed_forward_out_norm": sizes.rms_norm("post_mlp_layernorm"),
        }
    num_mtp = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    extra = range(sizes.num_layers, sizes.num_layers + num_mtp)
    return sizes.network(
        (
            sizes.pre_norm(layer, attention, sizes.gated_mlp() if layer < dense else moe, norms=norms, **behind)
            for layer in sizes.layers
        ),
        checkpoint=CheckpointNames(
            ignored_prefixes=tuple(f"model.layers.{layer}." for layer in extra),
            renamed=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        ),
    )
