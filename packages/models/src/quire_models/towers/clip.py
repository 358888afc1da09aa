"""The images of CLIP and SigLIP: a tower that makes one vector of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.spec import CheckpointNames, LinearSpec, NormSpec
from quire_models.towers.reading import vit_parts
from quire_models.towers.vector_tower_spec import AttentionPoolSpec, VectorTowerSpec

__all__ = ["spec", "spec_of_siglip"]

_TOWER = "vision_model"


def spec(values: Mapping[str, Any]) -> VectorTowerSpec | None:
    """The vector of the class token, behind a norm, goes through a product."""
    parts = vit_parts({"model_type": "clip_vision_model", **(values.get("vision_config") or {})}, _TOWER)
    if parts is None:
        return None
    width = parts["patch"].hidden_size
    eps = (values.get("vision_config") or {}).get("layer_norm_eps", 1e-5)
    out = Fields(values, "config.json").integer("projection_dim", default=512, minimum=1)
    steps = (
        NormSpec(name=f"{_TOWER}.post_layernorm", size=width, eps=eps, kind="layer", has_bias=True),
        LinearSpec(name="visual_projection", in_features=width, out_features=out),
    )
    return _tower(parts, connector=steps, out_features=out)


def spec_of_siglip(values: Mapping[str, Any]) -> VectorTowerSpec | None:
    """A learned query attends to all patches, and goes through a feed-forward network."""
    vision = {"model_type": "siglip_vision_model", **(values.get("vision_config") or {})}
    parts = vit_parts(vision, _TOWER)
    if parts is None or vision.get("vision_use_head") is False:
        return None
    layer = parts["layers"][0]
    pool = AttentionPoolSpec(
        name=f"{_TOWER}.head",
        hidden_size=parts["patch"].hidden_size,
        num_heads=layer.mixers[0].num_heads,
        intermediate_size=parts["intermediate_size"],
        act=layer.feed_forward.act,
        eps=layer.input_norm.eps,
    )
    return _tower(parts, pool=pool, connector=(), out_features=pool.hidden_size)


def _tower(parts: Mapping[str, Any], **fields: Any) -> VectorTowerSpec:
    return VectorTowerSpec(
        inputs={Modality.IMAGE: ("pixel_values",)},
        keeps_class_token=True,
        checkpoint=CheckpointNames(),
        **parts,
        **fields,
    )
