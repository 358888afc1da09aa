"""Jamba's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import Mamba1Shape, WeightCount, dt_rank
from quire_models.recurrent_config import HybridConfig, gated_mlp_weights, hybrid_fields

__all__ = ["JambaConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(HybridConfig):
    """Experts in some layers."""

    sparse_layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_tok: int

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width` and `MoEConfig.inner_width`."""
        routed = self.num_experts_per_tok * (self.hidden_size + 2 * self.intermediate_size)
        return max(routed + self.hidden_size, self.mixer_width)


def read_config(config: Fields) -> JambaConfig:
    """Attention and experts come every so many layers; positions are not rotated."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    values = decoder_fields(config) | {"rotary_dim": 0}
    hidden, layers, inner = values["hidden_size"], values["num_layers"], values["intermediate_size"]
    mixer = Mamba1Shape(
        hidden_size=hidden,
        inner_size=config.integer("mamba_expand", default=2, minimum=1) * hidden,
        state_size=config.integer("mamba_d_state", default=16, minimum=1),
        dt_rank=dt_rank(config, "mamba_dt_rank", hidden),
        conv_kernel=config.integer("mamba_d_conv", default=4, minimum=1),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        eps=values["rms_norm_eps"],
        norms="weighted",
    )
    num_experts = config.integer("num_experts", default=16, minimum=1)
    per_token = config.integer("num_experts_per_tok", default=2, minimum=1)
    if per_token > num_experts > 1:
        raise CheckpointError(
            f"{config.source}: num_experts_per_tok ({per_token}) must be at most num_experts ({num_experts})"
        )
    sparse = [num_experts > 1 and each for each in _periodic(config, "expert_layer", (2, 1), layers)]
    fields = hybrid_fields(values, mixer, _periodic(config, "attn_layer", (8, 4), layers))
    experts = gated_mlp_weights(hidden, inner, sum(sparse) * num_experts)
    fields["weights"] |= {
        "MLP": gated_mlp_weights(hidden, inner, layers - sum(sparse)),
        "experts": WeightCount(experts.matrices, sum(sparse) * hidden * num_experts),
    }
    return JambaConfig(**fields, sparse_layers=tuple(sparse), num_experts=num_experts, num_experts_per_tok=per_token)


def _periodic(config: Fields, name: str, defaults: tuple[int, int], layers: int) -> list[bool]:
    period = config.integer(f"{name}_period", default=defaults[0], minimum=1)
    offset = config.integer(f"{name}_offset", default=defaults[1], minimum=0)
    return [layer % period == offset for layer in range(layers)]
