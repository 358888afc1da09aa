"""GPT-NeoX (Pythia)'s config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["GPTNeoXConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """A network whose parts stand side by side or behind each other."""

    use_parallel_residual: bool


def read_config(config: Fields) -> GPTNeoXConfig:
    """A quarter of each head is rotated when it is not said otherwise."""
    named = config.named(
        rms_norm_eps="layer_norm_eps",
        num_key_value_heads="-",
        rope_theta="rotary_emb_base",
        partial_rotary_factor="rotary_pct",
    )
    bias = config.flag("attention_bias", default=True)
    values = decoder_fields(named, act="gelu", acts=ACTIVATIONS, partial=0.25, eps=1e-5)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    return GPTNeoXConfig(**values, use_parallel_residual=config.flag("use_parallel_residual", default=True))
