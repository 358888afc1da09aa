"""Pixtral's encoder (Agrawal et al. 2024, "Pixtral 12B", sec. 2.1) in Mistral Small 3 and LightOnOCR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.rope_config import RopeConfig
from quire_models.spec import LayerSpec, LinearSpec, NormSpec
from quire_models.towers.reading import activation_name, mlp_projector
from quire_models.towers.tower_spec import GridTowerSpec, PatchSpec, PixelShuffleSpec, padded_size

__all__ = ["spec", "spec_of_lighton_ocr"]

_EPS = 1e-5
"""Of the encoder's norms: the class has it as a constant."""


def spec(values: Mapping[str, Any], hidden_size: int) -> GridTowerSpec | None:
    """Mistral Small 3's."""
    bias = bool(values.get("multimodal_projector_bias", False))
    if values.get("vision_feature_layer", -1) != -1:
        return None
    return _tower(values, hidden_size, "vision_tower", "multi_modal_projector", bias=bias)


def spec_of_lighton_ocr(values: Mapping[str, Any], hidden_size: int) -> GridTowerSpec | None:
    """Other names."""
    return _tower(values, hidden_size, "vision_encoder", "vision_projection", bias=False)


def _tower(
    values: Mapping[str, Any], hidden_size: int, name: str, projector: str, *, bias: bool
) -> GridTowerSpec | None:
    """None for a variant that is not known."""
    vision = Fields(values.get("vision_config") or {}, "config.json: vision_config")
    text = values.get("text_config") or {}
    width = vision.integer("hidden_size", default=1024, minimum=1)
    heads = vision.integer("num_attention_heads", default=16, minimum=1)
    patch = vision.get("patch_size") or 16
    inner = vision.integer("intermediate_size", default=4096, minimum=1)
    act = activation_name(vision.text("hidden_act", default="gelu"))
    known = vision.text("model_type", default="pixtral") == "pixtral" and isinstance(patch, int)
    head_dim = vision.integer("head_dim", default=width // heads, minimum=1)
    if not known or act is None or width != heads * head_dim or head_dim % 4:
        return None
    theta = (vision.get("rope_parameters") or {}).get("rope_theta", vision.number("rope_theta", default=10000.0))
    projector_act = activation_name(values.get("projector_hidden_act", "gelu"))
    if projector_act is None:
        return None

    def norm(of: str) -> NormSpec:
        return NormSpec(name=of, size=width, eps=_EPS)

    attention = EncoderAttentionSpec(
        name="attention",
        hidden_size=width,
        num_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=False,
        names=ProjectionNames(),
        rope=RopeConfig(theta=theta),
    )
    layers = tuple(
        LayerSpec(
            name=f"{name}.transformer.layers.{layer}",
            mixers=(attention,),
            feed_forward=GatedMLPSpec(
                name="feed_forward", hidden_size=width, intermediate_size=padded_size(inner), act=act
            ),
            input_norm=norm("attention_norm"),
            feed_forward_norm=norm("ffn_norm"),
        )
        for layer in range(vision.integer("num_hidden_layers", default=24, minimum=1))
    )
    merge = int(values.get("spatial_merge_size", 2))
    return GridTowerSpec(
        inputs={Modality.IMAGE: ("pixel_values", "image_sizes")},
        patch=PatchSpec(name=f"{name}.patch_conv", hidden_size=width, patch_size=patch, has_bias=False),
        input_norm=norm(f"{name}.ln_pre"),
        layers=layers,
        intermediate_size=inner,
        connector=(
            NormSpec(name=f"{projector}.norm", size=width, eps=text.get("rms_norm_eps", 1e-6)),
            PixelShuffleSpec(factor=merge, channels_first=True),
            LinearSpec(
                name=f"{projector}.patch_merger.merging_layer", in_features=width * merge**2, out_features=width
            ),
            *mlp_projector(projector, width, hidden_size, projector_act, bias=bias),
        ),
        merge_size=merge,
        rope_theta=theta,
        alternates_frequencies=True,
        pixel_layout="image",
    )
