"""Config.json of Qwen's mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MoEConfig, expert_counts
from quire_models.qwen2.config import qwen_windows

__all__ = ["qwen_moe_fields", "read_config", "sparse_layers"]


def qwen_moe_fields(config: Fields, *, head_dim: int | None, inner: int) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE have in common. `head_dim` and `inner` are the class's own defaults."""
    if config.get("num_experts") is None:
        config = config.named(num_experts="num_local_experts")  # as newer files name it
    values = decoder_fields(config, head_dim=head_dim)
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    layers = values["num_layers"]
    return values | {
        "sliding_windows": qwen_windows(config, layers),
        "sparse_layers": sparse_layers(config, layers),
        "num_experts": num_experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": config.integer("moe_intermediate_size", default=inner, minimum=1),
        "renormalize": config.flag("norm_topk_prob", default=False),
    }


def sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but none of `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", default=1, minimum=1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        raise CheckpointError(f"{config.source}: mlp_only_layers must be a list of layers, is {plain!r}")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def read_config(config: Fields) -> MoEConfig:
    """Biases on query, key and value; a shared expert beside the routed ones."""
    values = qwen_moe_fields(config, head_dim=None, inner=1408)
    values["qkv_bias"] = config.flag("qkv_bias", default=True)
    return MoEConfig(
        **values,
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", default=5632, minimum=1),
        shared_name="mlp.shared_expert",
        router_parameters=values["hidden_size"],
    )
