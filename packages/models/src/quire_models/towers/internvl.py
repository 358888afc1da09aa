"""InternVL (Chen et al. 2024): InternViT, then squares of patches through two products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import LayerSpec, NormSpec
from quire_models.towers.reading import activation_name, mlp_projector
from quire_models.towers.tower_spec import LearnedPositionsSpec, PatchSpec, PixelShuffleSpec, TileTowerSpec, padded_size

__all__ = ["spec"]

_NAMES = ProjectionNames(out="projection_layer")


def spec(values: Mapping[str, Any], hidden_size: int) -> TileTowerSpec | None:
    """Square tiles; norms of queries and keys, and features behind earlier layers, are not described."""
    vision = Fields(values.get("vision_config") or {}, "config.json: vision_config")
    width = vision.integer("hidden_size", default=1024, minimum=1)
    heads = vision.integer("num_attention_heads", default=16, minimum=1)
    inner = vision.integer("intermediate_size", default=4096, minimum=1)
    image, patch = _side(vision.get("image_size") or 448), _side(vision.get("patch_size") or 14)
    acts = (
        activation_name(vision.text("hidden_act", default="gelu")),
        activation_name(values.get("projector_hidden_act", "gelu")),
    )
    ratio = 1 / values.get("downsample_ratio", 0.5)
    kind = {"layer_norm": "layer", "rms_norm": "rms"}.get(vision.text("norm_type", default="layer_norm"))
    known = (
        vision.text("model_type", default="internvl_vision") == "internvl_vision"
        and not vision.flag("use_qk_norm", default=False)
        and vision.flag("use_absolute_position_embeddings", default=True)
        and values.get("vision_feature_layer", -1) == -1
        and values.get("vision_feature_select_strategy", "default") == "default"
    )
    if not known or None in acts or kind is None or width % heads or not image or not patch or ratio != int(ratio):
        return None
    if (image // patch) % int(ratio):
        return None
    eps, factor = vision.number("layer_norm_eps", default=1e-6, above=0.0), int(ratio)

    def norm(name: str, size: int = width, norm_kind: Any = kind, norm_eps: float = eps) -> NormSpec:
        return NormSpec(name=name, size=size, eps=norm_eps, kind=norm_kind, has_bias=norm_kind == "layer")

    has_bias = vision.flag("attention_bias", default=False)
    attention = EncoderAttentionSpec(
        name="attention",
        hidden_size=width,
        num_heads=heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        bias=True,
        names=_NAMES,
        unbiased=() if has_bias else _NAMES[:3],
    )
    layers = tuple(
        LayerSpec(
            name=f"vision_tower.encoder.layer.{layer}",
            mixers=(attention,),
            feed_forward=MLPSpec(hidden_size=width, intermediate_size=padded_size(inner), act=str(acts[0])),
            input_norm=norm("layernorm_before"),
            feed_forward_norm=norm("layernorm_after"),
        )
        for layer in range(vision.integer("num_hidden_layers", default=24, minimum=1))
    )
    embeddings, merged = "vision_tower.embeddings", width * factor**2
    has_last_norm = not vision.flag("use_mean_pooling", default=True)
    return TileTowerSpec(
        inputs={Modality.IMAGE: ("pixel_values",), Modality.VIDEO: ("pixel_values",)},
        image_size=image,
        patch=PatchSpec(name=f"{embeddings}.patch_embeddings.projection", hidden_size=width, patch_size=patch),
        positions=LearnedPositionsSpec(
            name=f"{embeddings}.position_embeddings",
            side=image // patch,
            class_token=f"{embeddings}.cls_token",
            is_batched=True,
        ),
        layers=layers,
        layer_scales=("lambda_1", "lambda_2"),
        intermediate_size=inner,
        final_norm=norm("vision_tower.layernorm", norm_kind="layer") if has_last_norm else None,
        connector=(
            PixelShuffleSpec(factor=factor),
            norm("multi_modal_projector.layer_norm", merged, "layer", 1e-5),
            *mlp_projector("multi_modal_projector", merged, hidden_size, str(acts[1])),
        ),
    )


def _side(size: Any) -> int:
    """A side in pixels of what is square; 0 for anything else."""
    sides = set(size) if isinstance(size, list | tuple) else {size}
    side = sides.pop() if len(sides) == 1 else 0
    return side if isinstance(side, int) else 0
