"""Falcon's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["FalconConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(ModelConfig):
    """A network of one of three shapes."""

    num_norms: int
    """Behind each other: 2. Side by side: 1 for both parts (7B), or 2, one for each (40B, Falcon 2)."""
    is_parallel: bool
    """Attention and feed-forward network stand side by side."""


def read_config(config: Fields) -> FalconConfig:
    """Query heads share one key-value head (7B), or do so in groups (40B), or have one each. Positions come by
    rotation, or as ALiBi slopes (RW)."""
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
    values = decoder_fields(
        named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, inner_factor=4, context=2048, rotary=not alibi
    )
    if not is_new and config.flag("multi_query", default=True):
        values["num_kv_heads"] = 1
    bias = config.flag("bias", default=False)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bias, "mlp_gated": False, "norm_bias": True}
    num_norms = config.integer("num_ln_in_parallel_attn", default=2 if is_new else 1, minimum=1)
    num_norms = 2 if not is_parallel else num_norms if is_new else 1
    return FalconConfig(**values, alibi=alibi, norms_per_layer=num_norms, num_norms=num_norms, is_parallel=is_parallel)
