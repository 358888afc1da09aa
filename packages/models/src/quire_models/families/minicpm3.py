"""MiniCPM3 (OpenBMB 2024): latent attention as in DeepSeek-V2, with MiniCPM's factors of embedding, residuals and
logits."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.spec import HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """What a part gives is multiplied by `scale_depth` over the root of the number of layers."""
    heads = config.integer("num_attention_heads", minimum=1)
    defaults = {
        "v_head_dim": config.integer("hidden_size", minimum=1) // heads, "rms_norm_eps": 1e-5, "kv_lora_rank": 256,
        "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    }  # fmt: skip
    for name, value in defaults.items():
        config = config.with_default(name, value)
    sizes, attention = latent_attention(config)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    factor = config.number("scale_depth", default=1.4) / sizes.num_layers**0.5
    base = config.integer("dim_model_base", default=256, minimum=1)
    attention = replace(attention, interleaved=False)
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp, residual_factor=factor) for layer in sizes.layers),
        embedding=sizes.embedding(factor=config.number("scale_emb", default=12.0)),
        head=HeadSpec(tied=config.flag("tie_word_embeddings", default=True), factor=base / sizes.hidden_size),
    )
