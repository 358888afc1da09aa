"""Phi-3.5-MoE (Microsoft 2024): Mixtral with layer norms, biases, and experts that SparseMixer-v2 chooses (Liu et al.
2024, arXiv:2409.12136)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.mixtral import mixtral_moe
from quire_models.feed_forward_spec import SparseMoESpec, StackedExperts
from quire_models.rope_config import RopeConfig
from quire_models.spec import HeadSpec, NetworkSpec, recast

__all__ = ["SparseMixerMoESpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMixerMoESpec(SparseMoESpec):
    """Experts that are chosen one after the other, each weighed among those that are nearly as good as it."""

    threshold: float
    """How far below the best a score may be, as a share of the larger of both, to count beside it."""
    built_by: ClassVar[str] = "quire_models.families.phimoe_layers:SparseMixerMoE"


def spec(config: Fields) -> NetworkSpec:
    """A token has two experts, whatever config.json says of their number."""
    config.fixed("num_experts_per_tok", 2)
    sizes = decoder_sizes(config, eps=1e-5)
    sizes = replace(sizes, rope=_rope(config, sizes))
    moe = recast(
        SparseMixerMoESpec,
        mixtral_moe(config, sizes),
        threshold=2 * config.number("router_jitter_noise", default=0.01, minimum=0.0),
    )
    moe = replace(moe, stacked=StackedExperts(at="mlp", router="router.weight"))
    bias = config.flag("attention_bias", default=False)
    return sizes.network(
        (
            sizes.pre_norm(layer, sizes.attention(bias=bias, sliding_window=window), moe, norm=sizes.layer_norm)
            for layer, window in enumerate(layer_windows(config, sizes.num_layers))
        ),
        final_norm=sizes.layer_norm("norm"),
        head=HeadSpec(tied=sizes.tied, bias=config.flag("lm_head_bias", default=False)),
    )


def _rope(config: Fields, sizes: DecoderSizes) -> RopeConfig | None:
    """The rotation, whose factor of cosines and sines config.json says where it extends the context.

    Raises:
        CheckpointError: Short and long texts have factors of their own, which no published checkpoint has.
    """
    raw = config.get("rope_parameters") or config.get("rope_scaling")
    if sizes.rope is None or not isinstance(raw, Mapping) or sizes.rope.kind != "longrope":
        return sizes.rope
    rope = Fields(raw, f"{config.source}: rope_scaling")
    factor = rope.number("long_mscale", default=sizes.rope.attention_factor, above=0.0)
    short = rope.number("short_mscale", default=factor, above=0.0)
    if short != factor:
        raise CheckpointError(f"{rope.source}: short_mscale ({short}) and long_mscale ({factor}) must be equal")
    return replace(sizes.rope, attention_factor=factor)
