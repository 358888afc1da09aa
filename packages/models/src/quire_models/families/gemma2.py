"""Gemma 2 (Gemma Team 2024): norms before and after each part, soft caps, windows in every other layer; and Gemma 3,
text (Gemma Team 2025), with normalised heads and two rotations instead of soft caps."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.gemma import gemma_embedding, gemma_norm
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.rope_config import parse_rope
from quire_models.spec import HeadSpec, LayerSpec, NetworkSpec

__all__ = ["spec", "spec_of_gemma3"]


def spec(config: Fields) -> NetworkSpec:
    """Every other layer slides, from the first, unless `layer_types` says otherwise."""
    sizes, attention, head = _parts(config)
    windows = layer_windows(config, sizes.num_layers, default=tuple(layer % 2 == 0 for layer in sizes.layers))
    layers = (_layer(sizes, layer, replace(attention, sliding_window=each)) for layer, each in enumerate(windows))
    return sizes.network(layers, embedding=gemma_embedding(sizes), final_norm=gemma_norm(sizes, "norm"), head=head)


def spec_of_gemma3(config: Fields) -> NetworkSpec:
    """Five sliding layers, which rotate by another base, then one of full attention, unless `layer_types` says
    otherwise."""
    sizes, attention, head = _parts(config)
    positions = config.integer("max_position_embeddings", minimum=1)
    period = config.integer("sliding_window_pattern", default=6, minimum=1)
    slides = tuple((layer + 1) % period != 0 for layer in sizes.layers)
    rope = parse_rope(config, max_position_embeddings=positions, theta=1e6, layers="full_attention")
    local = config.named(rope_theta="rope_local_base_freq", rope_scaling="-")
    local_rope = parse_rope(local, max_position_embeddings=positions, layers="sliding_attention")
    attention = replace(
        attention,
        q_norm=gemma_norm(sizes, "q_norm", sizes.head_dim),
        k_norm=gemma_norm(sizes, "k_norm", sizes.head_dim),
    )
    sizes = replace(sizes, max_model_len=positions)
    layers = (
        _layer(sizes, layer, replace(attention, sliding_window=window, rope=rope if window is None else local_rope))
        for layer, window in enumerate(layer_windows(config, sizes.num_layers, default=slides))
    )
    return sizes.network(layers, embedding=gemma_embedding(sizes), final_norm=gemma_norm(sizes, "norm"), head=head)


def _parts(config: Fields) -> tuple[DecoderSizes, SelfAttentionSpec, HeadSpec]:
    """What Gemma 2 and 3 have in common. Scores are divided by the root of `query_pre_attn_scalar`."""
    bias = config.flag("attention_bias", default=False)
    named = config.named(hidden_act="hidden_activation")
    sizes = decoder_sizes(named, tied=True, head_dim=256, act="gelu_pytorch_tanh", acts={"gelu"})
    scale = config.number("query_pre_attn_scalar", default=256.0, above=0.0) ** -0.5
    soft_cap = config.number("attn_logit_softcapping", default=None, above=0.0)
    head = HeadSpec(tied=sizes.tied, soft_cap=config.number("final_logit_softcapping", default=None, above=0.0))
    return sizes, sizes.attention(bias=bias, scale=scale, soft_cap=soft_cap), head


def _layer(sizes: DecoderSizes, layer: int, attention: SelfAttentionSpec) -> LayerSpec:
    return LayerSpec(
        name=f"model.layers.{layer}",
        mixers=(attention,),
        feed_forward=sizes.gated_mlp(),
        input_norm=gemma_norm(sizes, "input_layernorm"),
        attention_out_norm=gemma_norm(sizes, "post_attention_layernorm"),
        feed_forward_norm=gemma_norm(sizes, "pre_feedforward_layernorm"),
        feed_forward_out_norm=gemma_norm(sizes, "post_feedforward_layernorm"),
    )
