"""The layer behind the last one of some checkpoints, which predicts a further token, as a network of its own. Free of
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.deepseek_v2.config import LatentMoEConfig
from quire_models.glm4_moe.config import GroupedMoEConfig

__all__ = ["GroupedMtpConfig", "LatentMtpConfig", "mtp_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMtpConfig(GroupedMoEConfig):
    """Of GLM-4.5."""

    first_layer: int
    """Its number in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMtpConfig(LatentMoEConfig):
    """Of DeepSeek-V3."""

    first_layer: int
    """Its number in the checkpoint."""


_KINDS: dict[str, type[GroupedMtpConfig] | type[LatentMtpConfig]] = {
    "DeepseekV3ForCausalLM": LatentMtpConfig,
    "Glm4MoeForCausalLM": GroupedMtpConfig,
}


def mtp_config(target: ModelConfig) -> GroupedMtpConfig | LatentMtpConfig:
    """The network of the first layer behind the last one of `target`. Embedding and LM head are the target's.

    Raises:
        ConfigError: its checkpoint has no such layer, or one of another kind.
    """
    kind = _KINDS.get(target.architecture)
    if kind is None:
        raise ConfigError(
            f"{target.architecture} has no layers that predict further tokens, or none that are understood; method mtp "
            f"is for {', '.join(sorted(_KINDS))}",
            field="speculative_method",
        )
    assert isinstance(target, GroupedMoEConfig)
    if not target.num_nextn_predict_layers:
        raise ConfigError(
            "this checkpoint has no layers that predict further tokens (num_nextn_predict_layers in its config.json is "
            "0); use another speculative method",
            field="speculative_method",
        )
    values = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    size = target.hidden_size
    values |= {
        "architecture": "MtpHead",
        "num_layers": 1,
        "sparse_layers": (True,),
        "sliding_windows": (None,),
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "other_parameters": target.other_parameters // target.num_layers + 2 * size + 2 * size * size,
        "first_layer": target.num_layers,
    }
    return kind(**values)
