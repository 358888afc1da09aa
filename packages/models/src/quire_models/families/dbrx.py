"""DBRX (Databricks 2024): layer norms without biases, clipped projections, and experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import HIDDEN_ACTS
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec, NormSpec

__all__ = ["DbrxMoESpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DbrxMoESpec(SparseMoESpec):
    """Experts whose matrices are stacked along their rows."""

    built_by: ClassVar[str] = "quire_models.families.dbrx_layers:make_moe"


def spec(config: Fields) -> NetworkSpec:
    """Attention and experts have objects of their own in config.json."""
    empty: dict[str, Any] = {}
    of_attention = config.object("attn_config") or Fields(empty, config.source)
    of_experts = config.object("ffn_config") or Fields(empty, config.source)
    inner = of_experts.integer("ffn_hidden_size", default=3584, minimum=1)
    theta = of_attention.number("rope_theta", default=10000.0, above=1.0)
    sizes = decoder_sizes(
        config.named(
            hidden_size="d_model", num_attention_heads="n_heads", num_hidden_layers="n_layers",
            max_position_embeddings="max_seq_len", rms_norm_eps="-", hidden_act="-", head_dim="-",
        )
        .with_default("num_key_value_heads", of_attention.integer("kv_n_heads", default=1, minimum=1))
        .with_default("intermediate_size", inner),
        theta=theta,
        eps=1e-5,
    )  # fmt: skip
    num_experts, per_token = expert_counts(
        of_experts.with_default("moe_num_experts", 4).with_default("moe_top_k", 1), "moe_num_experts", "moe_top_k"
    )
    power = of_experts.get("moe_normalize_expert_weights")
    if power not in (None, 1):
        raise CheckpointError(f"{of_experts.source}: moe_normalize_expert_weights {power!r} is not supported")
    is_normalized = power == 1 or "moe_normalize_expert_weights" not in (config.get("ffn_config") or {})
    of_experts.skip("moe_jitter_eps", "moe_loss_weight", "hidden_size")
    of_attention.skip("attn_pdrop")
    act = of_experts.object("ffn_act_fn")
    moe = DbrxMoESpec(
        name="ffn",
        hidden_size=sizes.hidden_size,
        num_experts=num_experts,
        intermediate_size=inner,
        act=HIDDEN_ACTS.get("silu" if act is None else act.text("name", default="silu"), "") or sizes.act,
        routing=Routing(top_k=per_token, scoring="softmax", renormalize=is_normalized),
        router="router.layer",
        names=("w1", "v1", "w2"),
        stacked=None,
    )
    attention = sizes.attention(
        name="norm_attn_norm.attn",
        names=ProjectionNames(out="out_proj"),
        clip=of_attention.number("clip_qkv", default=None, above=0.0),
    )

    def norm(name: str) -> NormSpec:
        return sizes.layer_norm(name, has_bias=False)

    return sizes.network(
        (
            sizes.pre_norm(
                layer, attention, moe, prefix="transformer.blocks", norm=norm,
                norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
            )
            for layer in sizes.layers
        ),
        body="transformer",
        embedding=sizes.embedding("wte"),
        final_norm=norm("norm_f"),
        checkpoint=CheckpointNames(fused=(sizes.fused_qkv("attn.Wqkv"),)),
    )  # fmt: skip
