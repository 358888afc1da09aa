"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose checkpoints keep projections of the same input in one matrix."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """One window for all layers."""
    sizes = decoder_sizes(config, partial=1.0, eps=1e-5)
    windows = layer_windows(config, sizes.num_layers)
    fused = (sizes.fused_qkv("self_attn.qkv_proj"), sizes.fused_gate_up("mlp.gate_up_proj"))
    layers = (sizes.pre_norm(layer, sizes.attention(sliding_window=each)) for layer, each in enumerate(windows))
    return sizes.network(layers, checkpoint=CheckpointNames(fused=fused))
