"""ModernBERT's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.encoder_config import EncoderOnlyConfig
from quire_models.rope_config import RopeConfig, parse_rope

__all__ = ["ModernBertConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderOnlyConfig):
    """ModernBERT. `sliding_windows` are how far a token of the layer sees, in each direction."""

    local_rope: RopeConfig
    """The rotation of layers that see a window; the others take `rope`."""
    has_norm_bias: bool


def read_config(config: Fields) -> ModernBertConfig:
    """Every third layer sees all of the text, the others a window."""
    named = config.named(hidden_act="hidden_activation", rms_norm_eps="norm_eps", num_key_value_heads="-")
    values = decoder_fields(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=8192)
    layers, length = values["num_layers"], values["max_model_len"]
    every = config.integer("global_attn_every_n_layers", default=3, minimum=1)
    kinds = config.texts("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(layers)
    ]
    window = config.integer("local_attention", default=128, minimum=2) // 2
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    norm_bias = config.flag("norm_bias", default=False)

    def rope(kind: str, theta: str, default: float) -> RopeConfig:
        base = config.number(theta, default=default, above=1.0)
        return parse_rope(config, max_position_embeddings=length, theta=base, layers=kind)

    values |= {
        "rope": rope("full_attention", "global_rope_theta", 160_000.0),
        "rotary_dim": values["head_dim"],
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": mlp_bias,
        "norm_bias": norm_bias,
        "tie_word_embeddings": True,
        "sliding_windows": tuple(None if kind == "full_attention" else window for kind in kinds),
    }
    return ModernBertConfig(
        **values,
        max_encoder_len=length,
        generates=False,
        local_rope=rope("sliding_attention", "local_rope_theta", 10_000.0),
        has_norm_bias=norm_bias,
        # A norm behind the embedding, but none before the first attention.
        other_parameters=0,
    )
