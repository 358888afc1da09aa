"""Gemma 3 and PaliGemma (Beyer et al. 2024): SigLIP, then a product, in Gemma 3 of the normed means of squares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire_interfaces import Modality
from quire_models.spec import CheckpointNames, LinearSpec, NormSpec
from quire_models.towers.reading import vit_parts
from quire_models.towers.tower_spec import ConnectorStep, PoolSpec, TileTowerSpec, TowerSpec

__all__ = ["spec", "spec_of_paligemma"]

_OLDER = ("vision_tower.vision_model.", "vision_tower.")
_PROJECTION = "multi_modal_projector.mm_input_projection_weight"


def spec(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """The weight of its product is stored [inputs, outputs]."""
    vision = values.get("vision_config") or {}
    parts, num_tokens = vit_parts(vision, "vision_tower"), values.get("mm_tokens_per_image", 256)
    if parts is None or parts["positions"].side % math.isqrt(num_tokens):
        return None
    width = parts["patch"].hidden_size
    norm = NormSpec(
        name="multi_modal_projector.mm_soft_emb_norm", size=width, eps=vision.get("layer_norm_eps", 1e-6), offset=1.0
    )
    steps: tuple[ConnectorStep, ...] = (
        PoolSpec(factor=parts["positions"].side // math.isqrt(num_tokens)),
        norm,
        LinearSpec(name=_PROJECTION, in_features=width, out_features=hidden_size),
    )
    names = CheckpointNames(
        renamed=(_OLDER, (_PROJECTION, f"{_PROJECTION}.weight")), transposed=(f"{_PROJECTION}.weight",)
    )
    return TileTowerSpec(inputs={Modality.IMAGE: ("pixel_values",)}, connector=steps, checkpoint=names, **parts)


def spec_of_paligemma(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """Every patch is a token."""
    parts = vit_parts(values.get("vision_config") or {}, "vision_tower")
    if parts is None:
        return None
    projection = LinearSpec(
        name="multi_modal_projector.linear",
        in_features=parts["patch"].hidden_size,
        out_features=hidden_size,
        bias=True,
    )
    names = CheckpointNames(renamed=(_OLDER,))
    return TileTowerSpec(inputs={Modality.IMAGE: ("pixel_values",)}, connector=(projection,), checkpoint=names, **parts)
