"""BioGPT (Luo et al. 2022): OPT with GELU and a scaled embedding."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.opt import POSITION_OFFSET, opt_layers
from quire_models.spec import HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The table of positions has two rows that are not used; the epsilon of norms is always 1e-5."""
    named = config.named(rms_norm_eps="-", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    scales = config.flag("scale_embedding", default=True)
    return sizes.network(
        opt_layers(sizes, "biogpt.layers"),
        body="biogpt",
        embedding=sizes.embedding(
            factor=sizes.hidden_size**0.5 if scales else 1.0,
            positions=sizes.positions("embed_positions", POSITION_OFFSET),
        ),
        final_norm=sizes.layer_norm("layer_norm"),
        head=HeadSpec(name="output_projection", tied=sizes.tied),
    )
