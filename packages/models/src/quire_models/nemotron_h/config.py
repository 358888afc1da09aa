"""Nemotron-H's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.glm4_moe.config import grouped_moe_fields
from quire_models.mixer_shapes import Mamba2Shape, WeightCount
from quire_models.recurrent_config import LayerCache, RecurrentConfig, attention_weights

__all__ = ["NemotronHConfig", "read_config"]

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
"""Kinds of layers, as `hybrid_override_pattern` writes them."""

LAYER_TYPES = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(RecurrentConfig):
    """Layers of one part each, feed-forward networks without a gate, and experts as in `GroupedMoEConfig`, if any."""

    mixer: Mamba2Shape
    pattern: str
    """Kind of each layer."""
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    renormalize: bool
    routed_scaling_factor: float
    n_group: int
    topk_group: int
    expert_input_size: int
    """What experts take and give: the hidden size, or less where they work on a projection."""

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width` and `MoEConfig.inner_width`."""
        routed = self.num_experts_per_tok * (self.expert_input_size + 2 * self.moe_intermediate_size)
        return max(
            2 * self.intermediate_size, 2 * self.shared_intermediate_size, routed + self.hidden_size, self.mixer_width
        )


def read_config(config: Fields) -> NemotronHConfig:
    """The number of layers is that of their kinds. Attention has no positions."""
    pattern = _pattern(config)
    config.fixed("sliding_window")
    config.fixed("tie_word_embeddings", False)  # the class has no such thing
    config.fixed("attention_bias", False)
    config.fixed("mamba_hidden_act", "silu")
    named = config.named(hidden_act="mlp_hidden_act", rms_norm_eps="layer_norm_epsilon")
    named = named.with_default("num_hidden_layers", len(pattern)).with_default("head_dim", 128)
    values = decoder_fields(named, act="relu2", acts=ACTIVATIONS, eps=1e-5, rotary=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    mixer = _mixer(config, values["hidden_size"], values["rms_norm_eps"])
    experts = _experts(config, values, sparse=MOE in pattern)
    caches = tuple(
        LayerCache(f"backbone.layers.{layer}.mixer", mixer.states if kind == MAMBA else ())
        for layer, kind in enumerate(pattern)
        if kind in MAMBA + ATTENTION
    )
    values |= {
        "num_layers": len(pattern),
        "mlp_bias": mlp_bias,
        "mlp_gated": False,
        "sliding_windows": (None,) * len(caches),
    }
    hidden = values["hidden_size"]
    weights = {
        "attention": attention_weights(values, pattern.count(ATTENTION)),
        "state space": mixer.weights(pattern.count(MAMBA)),
        "MLP": _mlp_weights(hidden, values["intermediate_size"], pattern.count(MLP), bias=mlp_bias),
        "norms": WeightCount(others=(len(pattern) + 1) * hidden),
    }
    if MOE in pattern:
        weights["experts"] = _expert_weights(hidden, experts, pattern.count(MOE), bias=mlp_bias)
    return NemotronHConfig(
        **values,
        **experts,
        mixer=mixer,
        mixer_width=mixer.width,
        caches=caches,
        pattern=pattern,
        weights=weights,
    )


def _pattern(config: Fields) -> str:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        pattern = config.text("hybrid_override_pattern")
        if pattern and not set(pattern) - set(LAYER_TYPES.values()):
            return pattern
        raise CheckpointError(
            f"{config.source}: hybrid_override_pattern must say {MAMBA}, {ATTENTION}, {MLP} or {MOE} for each layer, "
            f"is {pattern!r}"
        )
    if not isinstance(kinds, list) or not kinds or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layers_block_type must name one of {', '.join(LAYER_TYPES)} for each layer, is {kinds!r}"
        )
    return "".join(LAYER_TYPES[kind] for kind in kinds)


def _mixer(config: Fields, hidden: int, eps: float) -> Mamba2Shape:
    named = config.named(n_groups="n_groups" if config.get("n_groups") is not None else "mamba_n_groups")
    mixer = Mamba2Shape(
        hidden_size=hidden,
        num_heads=config.integer("mamba_num_heads", default=128, minimum=1),
        head_dim=config.integer("mamba_head_dim", default=64, minimum=1),
        state_size=config.integer("ssm_state_size", default=128, minimum=1),
        num_groups=named.integer("n_groups", default=8, minimum=1),
        conv_kernel=config.integer("conv_kernel", default=4, minimum=1),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias", default=False),
        eps=eps,
        # Not time_step_limit: this is what Transformers' scan does.
        dt_limit=(config.number("time_step_min", default=0.001, minimum=0.0), float("inf")),
    )
    mixer.check(config.source)
    return mixer


def _experts(config: Fields, values: dict[str, Any], *, sparse: bool) -> dict[str, Any]:
    hidden = values["hidden_size"]
    names = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_intermediate_size", "renormalize"]
    names += ["routed_scaling_factor", "n_group", "topk_group"]
    if not sparse:
        return dict.fromkeys(names, 0) | {"expert_input_size": hidden}
    config.fixed("n_shared_experts", 1)
    fields = grouped_moe_fields(config, values, dense_layers=0, renormalize=True)
    return {name: fields[name] for name in names} | {
        "shared_intermediate_size": config.integer("moe_shared_expert_intermediate_size", default=7688, minimum=1),
        "expert_input_size": config.integer("moe_latent_size", default=hidden, minimum=1),
    }


def _mlp_weights(hidden: int, inner: int, count: int, *, bias: bool = False) -> WeightCount:
    return WeightCount(((inner, hidden, count), (hidden, inner, count)), count * bias * (inner + hidden))


def _expert_weights(hidden: int, fields: dict[str, Any], layers: int, *, bias: bool) -> WeightCount:
    """Experts and routing, the shared network, and the projections around experts."""
    taken, num = fields["expert_input_size"], fields["num_experts"]
    routed = _mlp_weights(taken, fields["moe_intermediate_size"], layers * num)
    shared = _mlp_weights(hidden, fields["shared_intermediate_size"], layers, bias=bias)
    around = WeightCount() if taken == hidden else _mlp_weights(hidden, taken, layers, bias=bias)
    others = shared.others + around.others + layers * num * hidden
    return WeightCount(routed.matrices + shared.matrices + around.matrices, others)
