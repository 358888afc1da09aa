"""StarCoder2 (Lozhkov et al. 2024): pre-norm with layer norms, biases, and a feed-forward network without a gate."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS, layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Biases everywhere or nowhere; one window for all layers."""
    bias = config.flag("use_bias", default=True)
    named = config.named(rms_norm_eps="norm_epsilon")
    sizes = decoder_sizes(named, tied=True, act="gelu_pytorch_tanh", acts=ACTIVATIONS, eps=1e-5)
    mlp, windows = sizes.mlp(names=("c_fc", "c_proj"), bias=bias), layer_windows(config, sizes.num_layers)
    layers = (
        sizes.pre_norm(layer, sizes.attention(bias=bias, sliding_window=window), mlp, norm=sizes.layer_norm)
        for layer, window in enumerate(windows)
    )
    return sizes.network(layers, final_norm=sizes.layer_norm("norm"))
