"""XGLM (Lin et al. 2021): OPT with GELU, a scaled embedding and sinusoidal positions."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.opt import POSITION_OFFSET, opt_layers
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Positions are computed; the epsilon of norms is always 1e-5."""
    config.fixed("add_cross_attention", False)
    named = config.named(
        hidden_size="d_model",
        num_attention_heads="attention_heads",
        num_hidden_layers="num_layers",
        intermediate_size="ffn_dim",
        hidden_act="activation_function",
        rms_norm_eps="-",
        num_key_value_heads="-",
    )
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    if sizes.hidden_size % 2:
        raise CheckpointError(f"{config.source}: d_model must be even, is {sizes.hidden_size}")
    scales = config.flag("scale_embedding", default=True)
    return sizes.network(
        opt_layers(sizes, "model.layers"),
        embedding=sizes.embedding(
            factor=sizes.hidden_size**0.5 if scales else 1.0, positions=sizes.positions("", POSITION_OFFSET)
        ),
        final_norm=sizes.layer_norm("layer_norm"),
    )
