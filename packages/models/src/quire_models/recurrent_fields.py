"""Reading what families with recurrent layers have in common from config.json. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import hidden_act
from quire_models.decoder_sizes import DecoderSizes
from quire_models.mixer_spec import Mamba2Spec
from quire_models.spec import FeedForwardSpec, LayerSpec, MixerSpec, NetworkSpec

__all__ = [
    "LayerParts",
    "attention_free_sizes",
    "backbone",
    "check_groups",
    "dt_rank",
    "hybrid_mamba2",
    "time_step_limit",
]

CONTEXT_TOKENS = 32768
"""Context of a network whose config.json names none because its memory does not grow with it."""


class LayerParts(NamedTuple):
    """What stands in a layer of one part behind its norm: a mixer, or a feed-forward network."""

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None = None


def attention_free_sizes(config: Fields, *, tied: bool) -> DecoderSizes:
    """Sizes of a network without attention and feed-forward networks.

    Args:
        tied: Whether embedding and LM head share weights when config.json does not say.
    """
    return DecoderSizes(
        vocab_size=config.integer("vocab_size", minimum=1),
        hidden_size=config.integer("hidden_size", minimum=1),
        intermediate_size=0,
        num_layers=config.integer("num_hidden_layers", minimum=1),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        rotary_dim=0,
        rope=None,
        eps=config.number("layer_norm_epsilon", default=1e-5, minimum=0.0),
        act=hidden_act(config, acts={"silu"}),
        tied=config.flag("tie_word_embeddings", default=tied),
        max_model_len=config.integer("max_position_embeddings", default=CONTEXT_TOKENS, minimum=1),
    )


def backbone(sizes: DecoderSizes, parts: Sequence[LayerParts]) -> NetworkSpec:
    """A network whose layers have one part each, x + part(norm(x)), under the names of Mamba."""
    return sizes.network(
        (
            LayerSpec(
                name=f"backbone.layers.{layer}",
                mixers=() if mixer is None else (mixer,),
                feed_forward=feed_forward,
                input_norm=sizes.rms_norm("norm") if feed_forward is None else None,
                feed_forward_norm=None if feed_forward is None else sizes.rms_norm("norm"),
            )
            for layer, (mixer, feed_forward) in enumerate(parts)
        ),
        body="backbone",
        embedding=sizes.embedding("embeddings"),
        final_norm="norm_f",
        caches_by_mixer=True,
    )


def check_groups(mixer: Mamba2Spec, source: str) -> None:
    """Raises CheckpointError when groups do not divide heads; `source` names the file."""
    if mixer.num_heads % mixer.num_groups:
        raise CheckpointError(
            f"{source}: {mixer.num_heads} Mamba heads cannot be shared out to {mixer.num_groups} groups"
        )


def dt_rank(config: Fields, name: str, hidden_size: int) -> int:
    """Width that time steps are projected from; "auto" is a sixteenth of the hidden size, rounded up."""
    return math.ceil(hidden_size / 16) if config.get(name) in (None, "auto") else config.integer(name, minimum=1)


def hybrid_mamba2(config: Fields, sizes: DecoderSizes, **fields: Any) -> Mamba2Spec:
    """The Mamba-2 mixer of a hybrid, under Bamba's names of its fields; `fields` are others of `Mamba2Spec`."""
    hidden = sizes.hidden_size
    heads = config.integer("mamba_n_heads", default=128, minimum=1)
    inner = config.integer("mamba_d_ssm", default=int(config.number("mamba_expand", default=2) * hidden), minimum=1)
    is_derived = config.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if is_derived else config.integer("mamba_d_head", minimum=1)
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{config.source}: mamba_n_heads ({heads}) heads of mamba_d_head ({head_dim}) are not the mixer's inner "
            f"width ({inner})"
        )
    mixer = Mamba2Spec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", default=256, minimum=1),
        num_groups=config.integer("mamba_n_groups", default=1, minimum=1),
        conv_kernel=config.integer("mamba_d_conv", default=4, minimum=1),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        eps=sizes.eps,
        dt_limit=time_step_limit(config),
        **fields,
    )
    check_groups(mixer, config.source)
    return mixer


def time_step_limit(config: Fields) -> tuple[float, float]:
    """`time_step_limit` of a config.json; an infinite bound may be written as {"__float__": "Infinity"}."""
    bounds = config.get("time_step_limit")
    if bounds is None:
        return (0.0, float("inf"))
    try:
        low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in bounds)
    except (TypeError, ValueError, KeyError):
        low = high = float("nan")
    if not low <= high:
        raise CheckpointError(
            f"{config.source}: time_step_limit must be two numbers, the smaller one first, is {bounds!r}"
        )
    return (low, high)
