"""LLaVA 1.5 (Liu et al. 2023): CLIP or SigLIP up to a layer, then two products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Modality
from quire_models.spec import CheckpointNames
from quire_models.towers.reading import activation_name, mlp_projector, vit_parts
from quire_models.towers.tower_spec import TileTowerSpec, TowerSpec

__all__ = ["llava_parts", "spec"]


def spec(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """An image is one tile."""
    parts = llava_parts(values, hidden_size, feature_layer=-2, strategy="default")
    return None if parts is None else TileTowerSpec(inputs={Modality.IMAGE: ("pixel_values",)}, **parts)


def llava_parts(
    values: Mapping[str, Any], hidden_size: int, *, feature_layer: int, strategy: str
) -> dict[str, Any] | None:
    """Fields of `TileTowerSpec` for all LLaVA networks that take the features behind one layer.

    Args:
        feature_layer: `vision_feature_layer` where config.json does not say it.
        strategy: `vision_feature_select_strategy` where config.json does not say it: "default" drops the first token,
            "full" keeps all.
    """
    vision = values.get("vision_config") or {}
    layer = values.get("vision_feature_layer", feature_layer)
    strategy = values.get("vision_feature_select_strategy", strategy)
    whole = vit_parts(vision, "vision_tower")
    act = activation_name(values.get("projector_hidden_act", "gelu"))
    if whole is None or act is None or not isinstance(layer, int):
        return None
    has_class_token = bool(whole["positions"].class_token)
    if strategy == "default" and not has_class_token:
        return None  # a patch is dropped: nobody means that
    count = layer if layer >= 0 else len(whole["layers"]) + 1 + layer
    return {
        **whole,
        "layers": whole["layers"][:count],
        "final_norm": None,
        "keeps_class_token": has_class_token and strategy == "full",
        "connector": mlp_projector(
            "multi_modal_projector",
            whole["patch"].hidden_size,
            hidden_size,
            act,
            bias=values.get("multimodal_projector_bias", True),
        ),
        "checkpoint": CheckpointNames(renamed=(("vision_tower.vision_model.", "vision_tower."),)),
    }
