"""What families of towers have in common in config.json. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields
from quire_models.config_fields import HIDDEN_ACTS
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.mixer_spec import BART_NAMES
from quire_models.spec import LayerSpec, LinearSpec, NormSpec
from quire_models.towers.tower_spec import ActivationSpec, ConnectorStep, LearnedPositionsSpec, PatchSpec, padded_size

__all__ = ["VIT_DEFAULTS", "activation_name", "mlp_projector", "vit_parts"]

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
"""`model_type` of a vision tower -> fields that its class begins with."""


def activation_name(value: Any) -> str | None:
    """The function that config.json means; None where it is not known here."""
    return "quick_gelu" if value == "quick_gelu" else HIDDEN_ACTS.get(str(value))


def vit_parts(vision: Mapping[str, Any], name: str, *, num_layers: int | None = None) -> dict[str, Any] | None:
    """Fields of `TileTowerSpec` for CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023), which differ in the class
    token and the norm before the layers.

    Args:
        vision: `vision_config`.
        name: What the names of the tower begin with: "vision_tower".
        num_layers: Layers that count, from the first; None for all.

    Returns:
        None for a tower of another kind.
    """
    model_type = str(vision.get("model_type"))
    if model_type not in VIT_DEFAULTS:
        return None
    given = {key: value for key, value in vision.items() if value is not None}
    fields = Fields({**VIT_DEFAULTS[model_type], **given}, "config.json: vision_config")
    is_clip = model_type == "clip_vision_model"
    hidden, heads = fields.integer("hidden_size", minimum=1), fields.integer("num_attention_heads", minimum=1)
    image, patch = fields.get("image_size"), fields.get("patch_size")
    act, channels = activation_name(fields.get("hidden_act")), fields.integer("num_channels", default=3)
    if hidden % heads or act is None or channels != 3 or not isinstance(image, int) or not isinstance(patch, int):
        return None
    eps = fields.number("layer_norm_eps", above=0.0)

    def norm(of: str) -> NormSpec:
        return NormSpec(name=of, size=hidden, eps=eps, kind="layer", has_bias=True)

    all_layers = fields.integer("num_hidden_layers", minimum=1)
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
    layers = tuple(
        LayerSpec(
            name=f"{name}.encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=mlp,
            input_norm=norm("layer_norm1"),
            feed_forward_norm=norm("layer_norm2"),
        )
        for layer in range(all_layers if num_layers is None else num_layers)
    )
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
        "input_norm": norm(f"{name}.pre_layrnorm") if is_clip else None,
        "layers": layers,
        "intermediate_size": inner,
        "final_norm": None if is_clip else norm(f"{name}.post_layernorm"),
    }


def mlp_projector(
    name: str, in_features: int, out_features: int, act: str, *, bias: bool = True
) -> tuple[ConnectorStep, ...]:
    """linear_2(act(linear_1(x)))."""
    first = LinearSpec(name=f"{name}.linear_1", in_features=in_features, out_features=out_features, bias=bias)
    second = LinearSpec(name=f"{name}.linear_2", in_features=out_features, out_features=out_features, bias=bias)
    return (first, ActivationSpec(act=act), second)
