"""MPT's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["MptConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MptConfig(ModelConfig):
    """A network with ALiBi slopes."""

    attention_scale: float
    """Factor of the attention scores."""
    clip_qkv: float | None
    """Queries, keys and values are kept within this distance from zero."""
    alibi_bias_max: float
    """Exponent of the flattest slope."""


def read_config(config: Fields) -> MptConfig:
    """No biases, not even of norms; the feed-forward network is four times as wide as the stream."""
    config.fixed("no_bias", True)
    config.fixed("logit_scale")
    config.fixed("expansion_ratio", 4)
    config.fixed("embedding_fraction", 1.0)
    config.fixed("norm_type", "low_precision_layernorm", "layernorm")
    attention = Fields(config.get("attn_config") or {}, f"{config.source}: attn_config")
    attention.fixed("alibi", True)
    attention.fixed("qk_ln", False)
    attention.fixed("prefix_lm", False)
    attention.fixed("attn_type", "multihead_attention")
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
    values = decoder_fields(
        named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, inner_factor=4, context=2048
    )
    return MptConfig(
        **values,
        mlp_gated=False,
        alibi=True,
        attention_scale=attention.number("softmax_scale", default=values["head_dim"] ** -0.5),
        clip_qkv=attention.number("clip_qkv", default=None, minimum=0.0) or None,
        alibi_bias_max=attention.number("alibi_bias_max", default=8.0, above=0.0),
    )
