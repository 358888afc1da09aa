"""InternLM (Shanghai AI Laboratory 2023), InternLM3 (2025) and openPangu Embedded (Huawei 2025): Llama with biases in
other places."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec", "spec_of_internlm3", "spec_of_pangu"]


def spec(config: Fields) -> NetworkSpec:
    """All linear layers of attention have a bias where the file does not say otherwise."""
    return _network(config, bias=config.flag("bias", default=True))


def spec_of_internlm3(config: Fields) -> NetworkSpec:
    """A flag for the biases of queries, keys and values, and one for all others."""
    bias = config.flag("bias", default=False)
    return _network(config, qkv_bias=config.flag("qkv_bias", default=False), out_bias=bias, mlp_bias=bias)


def spec_of_pangu(config: Fields) -> NetworkSpec:
    """The flag has had two names."""
    return _network(config, bias=config.flag("bias", default=config.flag("attention_bias", default=False)))


def _network(config: Fields, *, mlp_bias: bool = False, **biases: bool) -> NetworkSpec:
    sizes = decoder_sizes(config)
    attention, mlp = sizes.attention(**biases), sizes.gated_mlp(bias=mlp_bias)
    return sizes.network(sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers)
