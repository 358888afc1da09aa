"""What config.json says about mixture-of-experts layers, in one record. Free of torch.

Shape legend: see `layers/moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig

__all__ = ["MIXTRAL_EXPERTS", "MoEConfig", "expert_counts"]

MIXTRAL_EXPERTS = ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3", "block_sparse_moe.experts.0.w2")
"""`MoEConfig.expert_names` of Mixtral and those after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(ModelConfig):
    """A network whose layers, or some of them, have experts. `intermediate_size` is that of the other layers."""

    sparse_layers: tuple[bool, ...]
    """Per layer: it has experts."""
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Width within an expert."""
    expert_bias: bool = False
    """Every matrix of an expert has a bias."""
    shared_intermediate_size: int = 0
    """Width of the network that every token uses beside its experts; 0 for none."""
    router_parameters: int = 0
    """Weights of a layer's routing beyond one row per expert."""
    expert_names: tuple[str, str, str] = ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj")
    """What the matrices of a layer's first expert are called in the layer, for which of them are quantized."""
    shared_name: str = "mlp.shared_experts"
    """The same for the network that every token uses."""
    renormalize: bool = True
    """The weights of a token's experts are made to sum to one."""

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width`; experts need their tokens gathered, and what is within them twice."""
        routed = self.num_experts_per_tok * (self.hidden_size + 2 * self.moe_intermediate_size)
        return max(3 * self.intermediate_size, routed + self.hidden_size, 3 * self.shared_intermediate_size)


def expert_counts(config: Fields, experts: str, per_token: str) -> tuple[int, int]:
    """Experts of a layer and of a token, from the fields of these names.

    Raises:
        CheckpointError: A token has more experts than there are.
    """
    num = config.integer(experts, minimum=1)
    chosen = config.integer(per_token, minimum=1)
    if chosen > num:
        raise CheckpointError(f"{config.source}: {per_token} ({chosen}) must be at most {experts} ({num})")
    return num, chosen
