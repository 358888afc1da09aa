"""MPT (MosaicML 2023): pre-norm without biases, ALiBi slopes instead of positions."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import AlibiSpec, ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec, NormSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """No biases, not even of norms; the feed-forward network is four times as wide as the stream."""
    config.fixed("no_bias", True)
    config.fixed("logit_scale")
    config.fixed("expansion_ratio", 4)
    config.fixed("embedding_fraction", 1.0)
    config.fixed("norm_type", "low_precision_layernorm", "layernorm")
    said = Fields(config.get("attn_config") or {}, f"{config.source}: attn_config")
    said.fixed("alibi", True)
    said.fixed("qk_ln", False)
    said.fixed("prefix_lm", False)
    said.fixed("attn_type", "multihead_attention")
    named = config.named(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
        intermediate_size="-",
        hidden_act="-",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads="-",
    )
    sizes = decoder_sizes(
        named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, inner_factor=4, context=2048
    )
    attention = sizes.attention(
        name="attn",
        scale=said.number("softmax_scale", default=sizes.head_dim**-0.5),
        clip=said.number("clip_qkv", default=None, minimum=0.0) or None,
        alibi=AlibiSpec(kind="mpt", bias_max=said.number("alibi_bias_max", default=8.0, above=0.0)),
        names=ProjectionNames(out="out_proj"),
    )
    mlp = sizes.mlp("ffn", names=("up_proj", "down_proj"), bias=False)

    def norm(name: str) -> NormSpec:
        return sizes.layer_norm(name, has_bias=False)

    return sizes.network(
        (
            sizes.pre_norm(layer, attention, mlp, prefix="transformer.blocks", norms=("norm_1", "norm_2"), norm=norm)
            for layer in sizes.layers
        ),
        body="transformer",
        embedding=sizes.embedding("wte"),
        final_norm=norm("norm_f"),
        checkpoint=CheckpointNames(fused=(sizes.fused_qkv("attn.Wqkv"),)),
    )
