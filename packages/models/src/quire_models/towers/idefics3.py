"""Idefics 3 (Laurençon et al. 2024) and SmolVLM: SigLIP, then squares of patches in one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Modality
from quire_models.spec import CheckpointNames, LinearSpec
from quire_models.towers.reading import vit_parts
from quire_models.towers.tower_spec import PixelShuffleSpec, TileTowerSpec, TowerSpec

__all__ = ["spec"]


def spec(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """Their tiles are of one size, the table's."""
    vision, factor = values.get("vision_config") or {}, values.get("scale_factor", 2)
    parts = vit_parts(vision, "vision_model")
    if parts is None or parts["positions"].side % factor:
        return None
    width = parts["patch"].hidden_size * factor**2
    projection = LinearSpec(
        name="connector.modality_projection.proj", in_features=width, out_features=hidden_size, bias=False
    )
    return TileTowerSpec(
        inputs={Modality.IMAGE: ("pixel_values",), Modality.VIDEO: ("pixel_values",)},
        connector=(PixelShuffleSpec(factor=factor), projection),
        checkpoint=CheckpointNames(renamed=(("vision_model.vision_model.", "vision_model."),)),
        **parts,
    )
