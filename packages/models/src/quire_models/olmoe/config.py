"""OLMoE's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MoEConfig, expert_counts

__all__ = ["read_config"]


def read_config(config: Fields, *, theta: float = 10000.0) -> MoEConfig:
    """Every layer has experts; norms over all heads of queries and keys.

    Args:
        theta: The class's default base of the rotation.
    """
    config.fixed("clip_qkv")
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, theta=theta)
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    layers = values["num_layers"]
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "other_parameters": layers * (values["num_heads"] + values["num_kv_heads"]) * values["head_dim"],
    }
    return MoEConfig(
        **values,
        sparse_layers=(True,) * layers,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        renormalize=config.flag("norm_topk_prob", default=False),
    )
