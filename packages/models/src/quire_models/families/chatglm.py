"""ChatGLM2, ChatGLM3 and GLM-4 with code of their own (GLM Team 2024, arXiv:2406.12793): grouped queries, half of each
head rotated in pairs of neighbours, gate and up in one matrix."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.rope_config import RopeConfig
from quire_models.spec import CheckpointNames, HeadSpec, NetworkSpec

__all__ = ["spec"]

NAMES = (
    ("transformer.embedding.word_embeddings.", "model.embed_tokens."),
    ("transformer.encoder.final_layernorm.", "model.norm."),
    ("transformer.encoder.layers.", "model.layers."),
    ("transformer.output_layer.", "lm_head."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".self_attention.", ".self_attn."),
    (".mlp.dense_h_to_4h.", ".mlp.gate_up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
"""(part of a name in the checkpoint, the network's)."""


def spec(config: Fields) -> NetworkSpec:
    """The base of the rotation is 10,000 times `rope_ratio`."""
    config.fixed("rmsnorm", True)
    config.fixed("post_layer_norm", True)
    config.fixed("apply_residual_connection_post_layernorm", False)
    config.fixed("prefix_projection", False)
    config.fixed("pre_seq_len", 0)
    groups = "multi_query_group_num" if config.flag("multi_query_attention", default=False) else "-"
    named = config.named(
        num_hidden_layers="num_layers",
        num_key_value_heads=groups,
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        vocab_size="padded_vocab_size",
        max_position_embeddings="seq_length",
        rms_norm_eps="layernorm_epsilon",
        hidden_act="-",
    )
    sizes = decoder_sizes(named, eps=1e-5, rotary=False)
    theta = 10000.0 * config.number("rope_ratio", default=1.0, above=0.0)
    sizes = replace(sizes, rope=RopeConfig(theta=theta, partial_rotary_factor=0.5), rotary_dim=sizes.head_dim // 2)
    bias = config.flag("add_bias_linear", default=False)
    attention = sizes.attention(
        qkv_bias=bias or config.flag("add_qkv_bias", default=False),
        out_bias=bias,
        interleaved=config.flag("original_rope", default=True),
    )
    mlp = sizes.gated_mlp(bias=bias)
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers),
        head=HeadSpec(tied=sizes.tied),
        checkpoint=CheckpointNames(
            ignored_prefixes=("transformer.rotary_pos_emb.", "transformer.vision."),
            renamed=NAMES,
            fused=(sizes.fused_qkv("self_attn.query_key_value"), sizes.fused_gate_up("mlp.gate_up_proj")),
        ),
    )
