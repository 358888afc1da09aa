"""PLaMo 3 (Preferred Networks 2025): norms before and after each part, stored as distances from what they begin at,
normalised heads, and windows that rotate by a base of their own."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.rope_config import parse_rope
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the parts begin at 1/5 and 1/5^1.5. Layers without a window extend the context by YaRN."""
    config.fixed("hidden_activation", "swiglu")
    config.fixed("attention_bias", False)
    sizes = decoder_sizes(config.named(rope_scaling="-", rope_parameters="-"), tied=True, head_dim=128)
    positions = config.integer("max_position_embeddings", minimum=1)
    factor = config.number("rope_scaling_factor", default=1.0, minimum=1.0)
    if factor > 1.0:
        original = config.integer("initial_context_length", minimum=1)
        scaling = {"factor": factor, "original_max_position_embeddings": original, "truncate": False}
        config = config.with_default("rope_scaling", {"full_attention": {"rope_type": "yarn", **scaling}})
    rope = parse_rope(config, max_position_embeddings=positions, theta=1e6, layers="full_attention")
    sizes = replace(sizes, max_model_len=rope.context_length(positions))
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
        for layer, window in enumerate(_windows(config, sizes.num_layers))
    )
    return sizes.network(layers, final_norm=sizes.rms_norm("norm", offset=1.0), checkpoint=checkpoint)


def _windows(config: Fields, layers: int) -> list[int | None]:
    """`interleaved_sliding_window` has the window of each layer, null for none; without it, each layer but every
    `sliding_window_pattern`-th has the window `window_size`."""
    windows = config.get("interleaved_sliding_window")
    if windows is None:
        window = config.integer("window_size", default=2048, minimum=1)
        period = config.integer("sliding_window_pattern", default=8, minimum=1)
        return [window if (layer + 1) % period else None for layer in range(layers)]
    if not isinstance(windows, list) or len(windows) != layers or not all(map(_is_window, windows)):
        raise CheckpointError(
            f"{config.source}: interleaved_sliding_window must have a number of tokens, or null, for each of {layers} "
            f"layers, is {windows!r}"
        )
    return windows


def _is_window(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
