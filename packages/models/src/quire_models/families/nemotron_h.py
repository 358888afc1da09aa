"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3: layers of one part each, Mamba-2, attention without
positions, feed-forward networks without a gate, or experts of that kind, which may work on a projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.glm4_moe import grouped_moe
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.mixer_spec import Mamba2Spec
from quire_models.recurrent_fields import LayerParts, backbone, check_groups
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, Weight, inside, recast

__all__ = ["LAYER_TYPES", "NAMES", "UngatedMoESpec", "spec"]

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS = "M", "*", "-", "E"
"""Kinds of layers, as `hybrid_override_pattern` writes them."""
LAYER_TYPES = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": FEED_FORWARD,
    "moe": EXPERTS,
}
NAMES = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class UngatedMoESpec(SparseMoESpec):
    """Experts without a gate, which may work on a projection of what they take."""

    latent_size: int
    """Width of that projection; the hidden size for none."""
    latent_bias: bool
    built_by: ClassVar[str] = "quire_models.families.nemotron_h_layers:NemotronHMoE"

    @property
    def expert_size(self) -> int:
        """Width of what experts take and give."""
        return self.latent_size

    def latent_projections(self) -> tuple[LinearSpec, ...]:
        """Layers before and behind the experts; none where they take the hidden size."""
        hidden, size, bias = self.hidden_size, self.latent_size, self.latent_bias
        if size == hidden:
            return ()
        return (
            LinearSpec(name="fc1_latent_proj", in_features=hidden, out_features=size, bias=bias),
            LinearSpec(name="fc2_latent_proj", in_features=size, out_features=hidden, bias=bias),
        )

    def weights(self) -> Iterator[Weight]:
        """Those of any mixture, and of the projections."""
        yield from SparseMoESpec.weights(self)
        for linear in self.latent_projections():
            yield from inside(self.name, linear.weights("experts"))


def spec(config: Fields) -> NetworkSpec:
    """The number of layers is that of their kinds. Attention has no positions."""
    pattern = _pattern(config)
    config.fixed("sliding_window")
    config.fixed("tie_word_embeddings", False)  # the class has no such thing
    config.fixed("attention_bias", False)
    config.fixed("mamba_hidden_act", "silu")
    named = config.named(hidden_act="mlp_hidden_act", rms_norm_eps="layer_norm_epsilon")
    named = named.with_default("num_hidden_layers", len(pattern)).with_default("head_dim", 128)
    sizes = decoder_sizes(named, act="relu2", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    bias = config.flag("mlp_bias", default=False)
    parts = {
        MAMBA: LayerParts(_mamba(config, sizes)),
        ATTENTION: LayerParts(sizes.attention(name="mixer")),
        FEED_FORWARD: LayerParts(None, sizes.mlp("mixer", NAMES, bias=bias)),
    }
    if EXPERTS in pattern:
        parts[EXPERTS] = LayerParts(None, _experts(config, sizes, bias=bias))
    return replace(
        backbone(sizes, [parts[kind] for kind in pattern]), checkpoint=CheckpointNames(ignored_prefixes=("mtp.",))
    )


def _pattern(config: Fields) -> str:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        pattern = config.text("hybrid_override_pattern")
        if pattern and not set(pattern) - set(LAYER_TYPES.values()):
            return pattern
        raise CheckpointError(
            f"{config.source}: hybrid_override_pattern must say {MAMBA}, {ATTENTION}, {FEED_FORWARD} or {EXPERTS} for "
            f"each layer, is {pattern!r}"
        )
    if not isinstance(kinds, list) or not kinds or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layers_block_type must name one of {', '.join(LAYER_TYPES)} for each layer, is {kinds!r}"
        )
    return "".join(LAYER_TYPES[kind] for kind in kinds)


def _mamba(config: Fields, sizes: DecoderSizes) -> Mamba2Spec:
    named = config.named(n_groups="n_groups" if config.get("n_groups") is not None else "mamba_n_groups")
    mixer = Mamba2Spec(
        name="mixer",
        hidden_size=sizes.hidden_size,
        num_heads=config.integer("mamba_num_heads", default=128, minimum=1),
        head_dim=config.integer("mamba_head_dim", default=64, minimum=1),
        state_size=config.integer("ssm_state_size", default=128, minimum=1),
        num_groups=named.integer("n_groups", default=8, minimum=1),
        conv_kernel=config.integer("conv_kernel", default=4, minimum=1),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias", default=False),
        eps=sizes.eps,
        # Not time_step_limit: this is what Transformers' scan does.
        dt_limit=(config.number("time_step_min", default=0.001, minimum=0.0), float("inf")),
    )
    check_groups(mixer, config.source)
    return mixer


def _experts(config: Fields, sizes: DecoderSizes, *, bias: bool) -> UngatedMoESpec:
    config.fixed("n_shared_experts", 1)
    shared = config.integer("moe_shared_expert_intermediate_size", default=7688, minimum=1)
    moe = grouped_moe(
        config,
        sizes,
        name="mixer",
        names=NAMES,
        stacked=None,
        shared=sizes.mlp("mixer.shared_experts", NAMES, intermediate_size=shared, bias=bias),
    )
    latent = config.integer("moe_latent_size", default=sizes.hidden_size, minimum=1)
    return recast(UngatedMoESpec, moe, latent_size=latent, latent_bias=bias)
