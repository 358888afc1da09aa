"""StableLM's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["StableLmConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(ModelConfig):
    """A network with options."""

    qk_layernorm: bool
    """Each query and key head has a layer norm of its own."""
    use_parallel_residual: bool
    """Attention and feed-forward network stand side by side behind one norm."""


def read_config(config: Fields) -> StableLmConfig:
    """A quarter of each head is rotated when it is not said otherwise."""
    values = decoder_fields(config.named(rms_norm_eps="layer_norm_eps"), partial=0.25, eps=1e-5)
    parallel = config.flag("use_parallel_residual", default=False)
    qk_layernorm = config.flag("qk_layernorm", default=False)
    heads = values["num_heads"] + values["num_kv_heads"]
    values |= {
        "qkv_bias": config.flag("use_qkv_bias", default=False),
        "norm_bias": True,
        "norms_per_layer": 1 if parallel else 2,
        "other_parameters": qk_layernorm * values["num_layers"] * heads * values["head_dim"],
    }
    return StableLmConfig(**values, qk_layernorm=qk_layernorm, use_parallel_residual=parallel)
