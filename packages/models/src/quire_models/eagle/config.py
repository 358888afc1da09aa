"""What the config.json of an EAGLE or EAGLE-3 head says. Free of torch.

Published heads name their architecture in several ways (some are called LlamaForCausalLM), so that the kind comes from
whoever asks; everything else is read as Llama's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire_interfaces import CheckpointError, Fields, read_json
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields
from quire_models.quantization_formats import parse_quantization, quantization_method
from quire_models.stored_linears import with_files

__all__ = ["EAGLE_KINDS", "EagleConfig", "default_feature_layers", "read_eagle_config"]

EAGLE_KINDS = ("eagle", "eagle3")
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(ModelConfig):
    """A head. `vocab_size` is the target's."""

    kind: str
    """One of `EAGLE_KINDS`."""
    draft_vocab_size: int
    """Tokens that the head can propose."""
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    """Layers of the target whose input is read (EAGLE-3); None where the checkpoint leaves it to the target's depth."""


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Those that EAGLE-3 heads read unless they say otherwise: the input of layers 2, L/2 and L - 3 (SafeAILab's
    reference implementation of Li et al. 2025)."""
    return (2, num_layers // 2, num_layers - 3)


def read_eagle_config(folder: str | Path, kind: str) -> EagleConfig:
    """Read the config.json of a head.

    Raises:
        CheckpointError: No such file, or a field that is missing or wrong.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is no folder of an EAGLE head")
    raw = read_json(path)
    config = Fields({**raw, "architectures": ["LlamaForCausalLM"]}, str(path))
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config)
    if kind == "eagle3" and values["num_layers"] != 1:
        raise CheckpointError(f"{path}: an EAGLE-3 head has one layer, num_hidden_layers is {values['num_layers']}")
    values |= {
        "architecture": "EagleHead",
        "model_type": "eagle",
        "qkv_bias": bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
        "tie_word_embeddings": False,
        "quantization_method": quantization_method(config),
        "quantization": with_files(parse_quantization(config), path.parent),
    }
    hidden = values["hidden_size"]
    return EagleConfig(
        **values,
        kind=kind,
        draft_vocab_size=config.integer("draft_vocab_size", default=values["vocab_size"], minimum=1),
        target_hidden_size=config.integer("target_hidden_size", default=hidden, minimum=1),
        feature_layers=_feature_layers(config) if kind == "eagle3" else None,
    )


def _feature_layers(config: Fields) -> tuple[int, ...] | None:
    nested = config.get("eagle_config")
    layers = config.get(_LAYERS) or (nested.get(_LAYERS) if isinstance(nested, dict) else None)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise CheckpointError(f"{config.source}: {_LAYERS} must be a list of layers, is {layers!r}")
    return tuple(layers)
