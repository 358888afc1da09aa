"""What families of towers have in common in config.json. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import HIDDEN_ACTS
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.mixer_spec import BART_NAMES
from quire_models.spec import LayerSpec, LinearSpec, NormSpec
from quire_models.towers.tower_spec import ActivationSpec, ConnectorStep, LearnedPositionsSpec, PatchSpec, padded_size

__all__ = ["VIT_DEFAULTS", "activation_name", "mlp_projector", "siglip2_parts", "vit_parts"]

_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_IDEFICS = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
VIT_DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": _SIGLIP,
    "idefics3_vision": _IDEFICS,
    "smolvlm_vision": _IDEFICS,
    "clip_vision_model": {**_SIGLIP, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
"""`model_type` of a vision tower over tiles of one size -> fields that its class begins with."""

_SIGLIP2 = {**_SIGLIP, "num_patches": 256}


def activation_name(value: Any) -> str | None:
    """The function that config.json means; None where it is not known here."""
    return "quick_gelu" if value == "quick_gelu" else HIDDEN_ACTS.get(str(value))


def vit_parts(vision: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Fields of `TileTowerSpec` for CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023), which differ in the class
    token and the norm before the layers.

    Args:
        vision: `vision_config`.
        name: What the names of the tower begin with: "vision_tower".

    Returns:
        None for a tower of another kind.
    """
    model_type = str(vision.get("model_type"))
    if model_type not in VIT_DEFAULTS:
        return None
    fields = _fields(vision, VIT_DEFAULTS[model_type])
    is_clip = model_type == "clip_vision_model"
    layers, image, patch = _vit_layers(fields, name), fields.get("image_size"), fields.get("patch_size")
    if not layers or not isinstance(image, int) or not isinstance(patch, int):
        return None
    hidden, eps = fields.integer("hidden_size"), fields.number("layer_norm_eps", above=0.0)
    return {
        "image_size": image,
        "patch": PatchSpec(
            name=f"{name}.embeddings.patch_embedding", hidden_size=hidden, patch_size=patch, has_bias=not is_clip
        ),
        "positions": LearnedPositionsSpec(
            name=f"{name}.embeddings.position_embedding.weight",
            side=image // patch,
            class_token=f"{name}.embeddings.class_embedding" if is_clip else "",
        ),
        "input_norm": _layer_norm(f"{name}.pre_layrnorm", hidden, eps) if is_clip else None,
        "layers": layers,
        "intermediate_size": fields.integer("intermediate_size"),
        "final_norm": None if is_clip else _layer_norm(f"{name}.post_layernorm", hidden, eps),
    }


def siglip2_parts(vision: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Fields of `GridTowerSpec` for SigLIP 2 in its NaFlex form (Tschannen et al. 2025, sec. 2.4.2): SigLIP's layers
    over packed patches of images of any size, with its positions stretched to each.

    Args:
        vision: `vision_config`.
        name: What the names of the tower begin with: "vision_tower".

    Returns:
        None for a tower of another kind.
    """
    if vision.get("model_type") != "siglip2_vision_model":
        return None
    fields = _fields(vision, _SIGLIP2)
    layers, patch = _vit_layers(fields, name), fields.get("patch_size")
    side = math.isqrt(fields.integer("num_patches", minimum=1))
    if not layers or not isinstance(patch, int) or side**2 != fields.integer("num_patches"):
        return None
    hidden, eps = fields.integer("hidden_size"), fields.number("layer_norm_eps", above=0.0)
    return {
        "patch": PatchSpec(
            name=f"{name}.embeddings.patch_embedding", hidden_size=hidden, patch_size=patch, is_linear=True
        ),
        "pixel_layout": "padded_rows",
        "position_table": f"{name}.embeddings.position_embedding.weight",
        "position_side": side,
        "is_antialiased": True,
        "layers": layers,
        "intermediate_size": fields.integer("intermediate_size"),
        "final_norm": _layer_norm(f"{name}.post_layernorm", hidden, eps),
    }


def _fields(vision: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    given = {key: value for key, value in vision.items() if value is not None}
    return Fields({**defaults, **given}, "config.json: vision_config")


def _layer_norm(name: str, size: int, eps: float) -> NormSpec:
    return NormSpec(name=name, size=size, eps=eps, kind="layer", has_bias=True)


def _vit_layers(fields: Fields, name: str) -> tuple[LayerSpec, ...]:
    """All layers of a tower; none for a variant that is not known."""
    hidden, heads = fields.integer("hidden_size", minimum=1), fields.integer("num_attention_heads", minimum=1)
    act, channels = activation_name(fields.get("hidden_act")), fields.integer("num_channels", default=3)
    if hidden % heads or act is None or channels != 3:
        return ()
    eps = fields.number("layer_norm_eps", above=0.0)
    attention = EncoderAttentionSpec(
        name="self_attn",
        hidden_size=hidden,
        num_heads=heads,
        head_dim=hidden // heads,
        scale=(hidden // heads) ** -0.5,
        bias=True,
        names=BART_NAMES,
    )
    inner = fields.integer("intermediate_size", minimum=1)
    mlp = MLPSpec(hidden_size=hidden, intermediate_size=padded_size(inner), act=act)
    return tuple(
        LayerSpec(
            name=f"{name}.encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=mlp,
            input_norm=_layer_norm("layer_norm1", hidden, eps),
            feed_forward_norm=_layer_norm("layer_norm2", hidden, eps),
        )
        for layer in range(fields.integer("num_hidden_layers", minimum=1))
    )


def mlp_projector(
    name: str, in_features: int, out_features: int, act: str, *, bias: bool = True, inner_features: int = 0
) -> tuple[ConnectorStep, ...]:
    """linear_2(act(linear_1(x))).

    Args:
        inner_features: Width between the two; 0 for `out_features`.
    """
    inner = inner_features or out_features
    first = LinearSpec(name=f"{name}.linear_1", in_features=in_features, out_features=inner, bias=bias)
    second = LinearSpec(name=f"{name}.linear_2", in_features=inner, out_features=out_features, bias=bias)
    return (first, ActivationSpec(act=act), second)
