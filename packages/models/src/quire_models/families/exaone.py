"""EXAONE 3 and 3.5 (LG AI Research 2024): Llama in other names."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Linear layers have no bias."""
    config = config.named(
        num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
    )
    sizes = decoder_sizes(config, eps=1e-5)
    attention = sizes.attention(name="attn.attention", names=ProjectionNames(out="out_proj"))
    mlp = sizes.gated_mlp(names=("c_fc_0", "c_fc_1", "c_proj"))
    layers = (
        sizes.pre_norm(layer, attention, mlp, prefix="transformer.h", norms=("ln_1", "ln_2")) for layer in sizes.layers
    )
    return sizes.network(layers, body="transformer", embedding=sizes.embedding("wte"), final_norm="ln_f")
