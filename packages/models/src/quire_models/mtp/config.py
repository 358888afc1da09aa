"""The layer behind the last one of some checkpoints, which predicts a further token, as a network of its own. Free of
torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.deepseek_v2.config import LatentMoEConfig
from quire_models.deepseek_v32.config import SparseLatentConfig
from quire_models.delta_config import GatedDeltaConfig
from quire_models.glm4_moe.config import GroupedMoEConfig
from quire_models.mixer_shapes import WeightCount
from quire_models.qwen3_next.config import Qwen3NextConfig
from quire_models.recurrent_config import LayerCache, gated_mlp_weights

__all__ = ["GroupedLayer", "GroupedMtpConfig", "LatentMtpConfig", "SparseMtpConfig", "mtp_config"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMtpConfig(SparseLatentConfig):
    """Of DeepSeek-V3.2: with an index of its own."""

    first_layer: int
    """Its number in the checkpoint."""


GroupedLayer = GroupedMtpConfig | LatentMtpConfig | SparseMtpConfig

_KINDS: dict[str, type[GroupedMtpConfig] | type[LatentMtpConfig] | type[SparseMtpConfig]] = {
    "DeepseekV3ForCausalLM": LatentMtpConfig,
    "DeepseekV32ForCausalLM": SparseMtpConfig,
    "Glm4MoeForCausalLM": GroupedMtpConfig,
}
_GATED = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")


def mtp_config(target: ModelConfig) -> GroupedLayer | GatedDeltaConfig:
    """The network of the first layer behind the last one of `target`. Embedding and LM head are the target's.

    Raises:
        ConfigError: its checkpoint has no such layer, or one of another kind.
    """
    if target.architecture in _GATED:
        assert isinstance(target, GatedDeltaConfig)
        return _gated_layer(target)
    kind = _KINDS.get(target.architecture)
    if kind is None:
        raise ConfigError(
            f"{target.architecture} has no layers that predict further tokens, or none that are understood; method mtp "
            f"is for {', '.join(sorted((*_KINDS, *_GATED)))}",
            field="speculative_method",
        )
    assert isinstance(target, GroupedMoEConfig)
    if not target.num_nextn_predict_layers:
        raise _none("num_nextn_predict_layers")
    size = target.hidden_size
    values = _fields(target) | {
        "architecture": "MtpHead",
        "num_layers": 1,
        "sparse_layers": (True,),
        "sliding_windows": (None,),
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "other_parameters": target.other_parameters // target.num_layers + 2 * size + 2 * size * size,
        "first_layer": target.num_layers,
    }
    if isinstance(target, SparseLatentConfig):
        values["index_layers"] = (True,)
    return kind(**values)


def _gated_layer(target: GatedDeltaConfig) -> GatedDeltaConfig:
    """Gated attention, and experts where the target has any."""
    if not target.num_mtp_layers:
        raise _none("mtp_num_hidden_layers")
    if not any(target.attention_layers):
        raise ConfigError("method mtp needs a model in which some layers attend", field="speculative_method")
    size, attending = target.hidden_size, sum(target.attention_layers)
    values = _fields(target) | {
        "architecture": "GatedMtpHead",
        "num_layers": 1,
        "attention_layers": (True,),
        "sliding_windows": (None,),
        "tie_word_embeddings": False,
        "caches": (LayerCache("model.layers.0"),),
    }
    weights = {
        "attention": target.weights["attention"].share(attending),
        "norms": WeightCount(others=5 * size),
        "projection": WeightCount(others=2 * size * size),
    }
    num_sparse = sum(target.sparse_layers) if isinstance(target, Qwen3NextConfig) else 0
    if isinstance(target, Qwen3NextConfig):
        values["sparse_layers"] = (num_sparse > 0,)
    if num_sparse:
        weights |= {name: target.weights[name].share(num_sparse) for name in ("experts", "shared experts")}
    else:
        weights["MLP"] = gated_mlp_weights(size, target.intermediate_size, 1)
    return type(target)(**values | {"weights": weights})


def _fields(target: ModelConfig) -> dict[str, Any]:
    return {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}


def _none(field: str) -> ConfigError:
    return ConfigError(
        f"this checkpoint has no layers that predict further tokens ({field} in its config.json is 0); use another "
        "speculative method",
        field="speculative_method",
    )
