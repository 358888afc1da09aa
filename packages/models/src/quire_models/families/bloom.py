"""Bloom (BigScience 2022): GPT with ALiBi slopes instead of positions, and a norm behind the embedding."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import AlibiSpec, ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Biases everywhere; the first checkpoints have no prefix."""
    config.fixed("apply_residual_connection_post_layernorm", False)
    named = config.named(
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="seq_length",
        intermediate_size="-",
        hidden_act="-",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads="-",
    )
    sizes = decoder_sizes(named, tied=True, act="gelu_new", eps=1e-5, rotary=False, inner_factor=4, context=2048)
    attention = sizes.attention(
        name="self_attention", bias=True, alibi=AlibiSpec(kind="bloom"), names=ProjectionNames(out="dense")
    )
    mlp = sizes.mlp(names=("dense_h_to_4h", "dense_4h_to_h"))
    return sizes.network(
        (
            sizes.pre_norm(layer, attention, mlp, prefix="transformer.h", norm=sizes.layer_norm)
            for layer in sizes.layers
        ),
        body="transformer",
        embedding=sizes.embedding("word_embeddings", norm=sizes.layer_norm("word_embeddings_layernorm")),
        final_norm=sizes.layer_norm("ln_f"),
        checkpoint=CheckpointNames(
            default_prefix="transformer.", fused=(sizes.fused_heads("self_attention.query_key_value"),)
        ),
    )
