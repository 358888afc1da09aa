"""BioGPT's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.opt.config import POSITION_OFFSET

__all__ = ["BioGptConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BioGptConfig(ModelConfig):
    """A network that may scale its embedding."""

    scale_embedding: bool


def read_config(config: Fields) -> BioGptConfig:
    """The table of positions has two rows that are not used; the epsilon of norms is always 1e-5."""
    named = config.named(rms_norm_eps="-", num_key_value_heads="-")
    values = decoder_fields(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    values["other_parameters"] = (values["max_model_len"] + POSITION_OFFSET) * values["hidden_size"]
    return BioGptConfig(**values, scale_embedding=config.flag("scale_embedding", default=True))
