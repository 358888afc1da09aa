"""OPT (Zhang et al. 2022): layer norms, learned positions, ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import BART_NAMES
from quire_models.spec import HeadSpec, LayerSpec, LinearSpec, NetworkSpec

__all__ = ["POSITION_OFFSET", "opt_layers", "spec"]

POSITION_OFFSET = 2
"""Rows of the table of positions that are not used."""


def opt_layers(
    sizes: DecoderSizes, prefix: str, *, bias: bool = True, norm_before: bool = True, **norm: bool
) -> Iterator[LayerSpec]:
    """Layers of OPT.

    Args:
        bias: Of all linear layers.
        norm_before: Norms stand before the parts; else behind the sums.
        norm: Fields of `NormSpec`.
    """
    attention = sizes.attention(bias=bias, names=BART_NAMES)
    mlp = sizes.mlp("", bias=bias)
    first, second = (sizes.layer_norm(f"{part}_layer_norm", **norm) for part in ("self_attn", "final"))
    for layer in sizes.layers:
        fields: dict[str, Any] = {"name": f"{prefix}.{layer}", "mixers": (attention,), "feed_forward": mlp}
        if norm_before:
            yield LayerSpec(**fields, input_norm=first, feed_forward_norm=second)
        else:
            yield LayerSpec(**fields, attention_out_norm=first, feed_forward_out_norm=second, arrangement="post_ln")


def spec(config: Fields) -> NetworkSpec:
    """Biases everywhere or nowhere. The 350M network has its norms behind the sums, and embeds in fewer dimensions;
    Galactica's norms have no weights."""
    bias = config.flag("enable_bias", default=True)
    norm_before = config.flag("do_layer_norm_before", default=True)
    has_final_norm = norm_before and not config.flag("_remove_final_layer_norm", default=False)
    weights = config.flag("layer_norm_elementwise_affine", default=True)
    norm = {"has_weight": weights, "has_bias": weights}
    named = config.named(
        intermediate_size="ffn_dim", hidden_act="activation_function", rms_norm_eps="-", num_key_value_heads="-"
    )
    sizes = decoder_sizes(named, tied=True, act="relu", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    hidden = sizes.hidden_size
    width = config.integer("word_embed_proj_dim", default=hidden, minimum=1)
    project_in = project_out = None
    if width != hidden:
        project_in = LinearSpec(name="project_in", in_features=width, out_features=hidden, is_plain=True)
        project_out = LinearSpec(name="project_out", in_features=hidden, out_features=width, is_plain=True)
    return sizes.network(
        opt_layers(sizes, "model.decoder.layers", bias=bias, norm_before=norm_before, **norm),
        body="model.decoder",
        embedding=sizes.embedding(
            size=width, project_in=project_in, positions=sizes.positions("embed_positions", POSITION_OFFSET)
        ),
        final_norm=sizes.layer_norm("final_layer_norm", **norm) if has_final_norm else None,
        head=HeadSpec(tied=sizes.tied, project_out=project_out),
    )
