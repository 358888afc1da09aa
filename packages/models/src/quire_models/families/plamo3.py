"""PLaMo 3 (Preferred Networks 2025): norms before and after each part, stored as distances from what they begin at,
normalised heads, and windows that rotate by a base of their own."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.rope_config import parse_rope
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Layers behind the parts begin at 1/5 and 1/5^1.5. `interleaved_sliding_window` names the window of each layer;
    else every `sliding_window_pattern`-th layer sees all tokens."""
    sizes = decoder_sizes(config.named(rope_scaling="-", rope_parameters="-"), head_dim=128)
    positions = config.integer("max_position_embeddings", minimum=1)
    period = config.integer("sliding_window_pattern", default=8, minimum=1)
    slides = tuple((layer + 1) % period != 0 for layer in sizes.layers)
    named = config
    rope = parse_rope(named, max_position_embeddings=positions, theta=1e6, layers="full_attention")
    local = config.named(rope_theta="rope_local_theta", rope_scaling="-")
    local_rope = parse_rope(local, max_position_embeddings=positions, layers="sliding_attention")
    attention = sizes.attention(name="mixer", **sizes.head_norms(offset=1.0))
    checkpoint = CheckpointNames(
        renamed=(("model.layers.layers.", "model.layers."),),
        fused=(sizes.fused_qkv("mixer.qkv_proj"), sizes.fused_gate_up("mlp.gate_up_proj")),
    )
    layers = (
        LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(replace(attention, sliding_window=window, rope=rope if window is None else local_rope),),
            feed_forward=sizes.gated_mlp(),
            input_norm=sizes.rms_norm("pre_mixer_norm", offset=1.0),
            attention_out_norm=sizes.rms_norm("post_mixer_norm", offset=1.0 / 5),
            feed_forward_norm=sizes.rms_norm("pre_mlp_norm", offset=1.0),
            feed_forward_out_norm=sizes.rms_norm("post_mlp_norm", offset=1.0 / 5**1.5),
        )
        for layer, window in enumerate(layer_windows(config, sizes.num_layers, default=slides))
    )
    return sizes.network(layers, final_norm=sizes.rms_norm("norm", offset=1.0), checkpoint=checkpoint)
