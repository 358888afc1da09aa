"""LFM2-VL: SigLIP 2 over tiles of any size, then two products over squares of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.spec import CheckpointNames, NormSpec
from quire_models.towers.reading import activation_name, mlp_projector, siglip2_parts
from quire_models.towers.tower_spec import GridTowerSpec, PixelShuffleSpec, TowerSpec

__all__ = ["spec"]

_EPS = 1e-5
"""Of the connector's norm: the class leaves it to torch."""


def spec(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """Each tile of an image has its own grid."""
    name, fields = "multi_modal_projector", Fields(values, "config.json")
    parts = siglip2_parts(values.get("vision_config") or {"model_type": "siglip2_vision_model"}, "vision_tower")
    act = activation_name(fields.text("projector_hidden_act", default="gelu"))
    factor = fields.integer("downsample_factor", default=2, minimum=1)
    if parts is None or act is None:
        return None
    width = parts["patch"].hidden_size * factor**2
    has_norm = fields.get("projector_use_layernorm") is not False
    norm = NormSpec(name=f"{name}.layer_norm", size=width, eps=_EPS, kind="layer", has_bias=True)
    return GridTowerSpec(
        inputs={Modality.IMAGE: ("pixel_values", "spatial_shapes")},
        connector=(
            PixelShuffleSpec(factor=factor),
            *((norm,) if has_norm else ()),
            *mlp_projector(
                name,
                width,
                hidden_size,
                act,
                bias=fields.get("projector_bias") is not False,
                inner_features=fields.integer("projector_hidden_size", default=2560, minimum=1),
            ),
        ),
        checkpoint=CheckpointNames(renamed=(("vision_tower.vision_model.", "vision_tower."),)),
        merge_size=factor,
        **parts,
    )
