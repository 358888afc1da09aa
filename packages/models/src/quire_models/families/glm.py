"""GLM-4 of 2024 (GLM Team 2024): Llama with biases, pairs of neighbours rotated in half of each head; and GLM-4 of
2025 (0414), with norms before and after each part."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec", "spec_of_glm4"]


def spec(config: Fields) -> NetworkSpec:
    """Query, key and value have biases."""
    sizes, attention, checkpoint = _parts(config)
    return sizes.network((sizes.pre_norm(layer, attention) for layer in sizes.layers), checkpoint=checkpoint)


def spec_of_glm4(config: Fields) -> NetworkSpec:
    """Twice as many norms."""
    sizes, attention, checkpoint = _parts(config)
    layers = (
        sizes.pre_norm(
            layer,
            attention,
            attention_out_norm=sizes.rms_norm("post_self_attn_layernorm"),
            feed_forward_out_norm=sizes.rms_norm("post_mlp_layernorm"),
        )
        for layer in sizes.layers
    )
    return sizes.network(layers, checkpoint=checkpoint)


def _parts(config: Fields) -> tuple[DecoderSizes, SelfAttentionSpec, CheckpointNames]:
    sizes = decoder_sizes(config, partial=0.5, eps=1.5625e-7, head_dim=128)
    attention = sizes.attention(qkv_bias=config.flag("attention_bias", default=True), interleaved=True)
    return sizes, attention, CheckpointNames(fused=(sizes.fused_gate_up("mlp.gate_up_proj"),))
