"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, few key-value heads."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import AlibiSpec, ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Query heads share one key-value head (7B), or do so in groups (40B), or have one each. Positions come by
    rotation, or as ALiBi slopes (RW). Parts side by side have one norm (7B), or one each (40B, Falcon 2)."""
    alibi = config.flag("alibi", default=False)
    is_new = config.flag("new_decoder_architecture", default=False)
    is_parallel = config.flag("parallel_attn", default=True)
    if is_new:
        config.fixed("parallel_attn", True)
    named = config.named(
        intermediate_size="ffn_hidden_size",
        hidden_act="activation",
        rms_norm_eps="layer_norm_epsilon",
        num_key_value_heads="num_kv_heads" if is_new else "-",
    )
    sizes = decoder_sizes(
        named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, inner_factor=4, context=2048, rotary=not alibi
    )
    if not is_new and config.flag("multi_query", default=True):
        sizes = replace(sizes, num_kv_heads=1)
    bias = config.flag("bias", default=False)
    num_norms = config.integer("num_ln_in_parallel_attn", default=2 if is_new else 1, minimum=1)
    norms: tuple[str, ...] = ("input_layernorm",)
    if not is_parallel:
        norms = ("input_layernorm", "post_attention_layernorm")
    elif is_new and num_norms > 1:
        norms = ("ln_attn", "ln_mlp")
    # As bfloat16 holds them, and scaled like the scores: so the class does.
    slopes = AlibiSpec(kind="bloom", is_bfloat16=True, factor=sizes.head_dim**-0.5) if alibi else None
    attention = sizes.attention(name="self_attention", bias=bias, alibi=slopes, names=ProjectionNames(out="dense"))
    mlp = sizes.mlp(names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    return sizes.network(
        (
            sizes.pre_norm(
                layer,
                attention,
                mlp,
                prefix="transformer.h",
                norms=norms,
                norm=sizes.layer_norm,
                arrangement="parallel" if is_parallel else "sequential",
            )
            for layer in sizes.layers
        ),
        body="transformer",
        embedding=sizes.embedding("word_embeddings"),
        final_norm=sizes.layer_norm("ln_f"),
        checkpoint=CheckpointNames(fused=(sizes.fused_heads("self_attention.query_key_value"),)),
    )
