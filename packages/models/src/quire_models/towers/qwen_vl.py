"""Qwen2-VL (Wang et al. 2024), Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL: an encoder of images and videos of any size.

The three differ in norms, feed-forward network and positions; the second has windows, the third features of earlier
layers. Qwen3.5 has the third's without these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.rope_config import RopeConfig
from quire_models.spec import CheckpointNames, FusedRows, LayerSpec, LinearSpec, NormSpec
from quire_models.towers.reading import activation_name
from quire_models.towers.tower_spec import (
    ActivationSpec,
    ConnectorStep,
    GridTowerSpec,
    MergeSpec,
    PatchSpec,
    padded_size,
)

__all__ = ["spec_of_2", "spec_of_2_5", "spec_of_3"]

_NAMES = ProjectionNames("q", "k", "v", "proj")
_EPS = 1e-6
"""Of every norm: the classes have it as a constant."""


def spec_of_2(values: Mapping[str, Any], hidden_size: int) -> GridTowerSpec | None:
    """Layer norms; `hidden_size` of its vision_config is that of the language model."""
    vision = _vision(values, embed_dim=1280, depth=32, mlp_ratio=4, hidden_act="quick_gelu", patch_size=14)
    width = vision.integer("embed_dim", minimum=1)
    inner = width * vision.integer("mlp_ratio", minimum=1)
    mlp = _mlp(vision, width, inner, ("fc1", "fc2"))
    return _tower(vision, width, hidden_size, inner, mlp, merger=_merger(vision, width, hidden_size, "layer"))


def spec_of_2_5(values: Mapping[str, Any], hidden_size: int) -> GridTowerSpec | None:
    """RMS norms, a gate, and windows in most layers."""
    vision = _vision(values, hidden_size=1280, depth=32, intermediate_size=3420, hidden_act="silu", patch_size=14)
    width, act = vision.integer("hidden_size", minimum=1), activation_name(vision.get("hidden_act"))
    if act is None:
        return None
    inner = vision.integer("intermediate_size", minimum=1)
    mlp = GatedMLPSpec(hidden_size=width, intermediate_size=padded_size(inner), act=act, bias=True)
    merger = _merger(vision, width, hidden_size, "rms")
    tower = _tower(vision, width, hidden_size, inner, mlp, merger=merger, norm="rms")
    if tower is None:
        return None
    pixels = vision.integer("window_size", default=112, minimum=1)
    full = vision.get("fullatt_block_indexes")
    return replace(
        tower,
        window_size=pixels // tower.merge_size // tower.patch.patch_size,
        full_attention_layers=frozenset((7, 15, 23, 31) if full is None else full),
    )


def spec_of_3(values: Mapping[str, Any], hidden_size: int) -> GridTowerSpec | None:
    """Layer norms, and a table of positions beside the rotation."""
    vision = _vision(
        values, hidden_size=1152, depth=27, intermediate_size=4304, hidden_act="gelu_pytorch_tanh", patch_size=16
    )
    width = vision.integer("hidden_size", minimum=1)
    side = math.isqrt(vision.integer("num_position_embeddings", default=2304, minimum=1))
    inner = vision.integer("intermediate_size", minimum=1)
    mlp = _mlp(vision, width, inner, ("linear_fc1", "linear_fc2"))
    merge = vision.integer("spatial_merge_size", default=2, minimum=1)
    merged = width * merge**2

    def merger(name: str, steps: tuple[ConnectorStep, ...]) -> tuple[ConnectorStep, ...]:
        return (*steps, *_products(f"visual.{name}.linear_fc1", f"visual.{name}.linear_fc2", merged, hidden_size))

    squares = MergeSpec(num_tokens=merge**2)
    last = merger("merger", (_norm("visual.merger.norm", width, "layer"), squares))
    tower = _tower(vision, width, hidden_size, inner, mlp, merger=last, has_patch_bias=True)
    layers = vision.get("deepstack_visual_indexes")
    if tower is None:
        return None
    deepstack = []
    for index, layer in enumerate(layers if isinstance(layers, list) else []):
        name = f"deepstack_merger_list.{index}"
        deepstack.append((layer, merger(name, (squares, _norm(f"visual.{name}.norm", merged, "layer")))))
    return replace(tower, position_table="visual.pos_embed.weight", position_side=side, deepstack=tuple(deepstack))


def _vision(values: Mapping[str, Any], **defaults: Any) -> Fields:
    given = {name: value for name, value in (values.get("vision_config") or {}).items() if value is not None}
    return Fields({**defaults, **given}, "config.json: vision_config")


def _norm(name: str, size: int, kind: Any) -> NormSpec:
    return NormSpec(name=name, size=size, eps=_EPS, kind=kind, has_bias=kind == "layer")


def _mlp(vision: Fields, width: int, inner: int, names: tuple[str, str]) -> MLPSpec | None:
    act = activation_name(vision.get("hidden_act"))
    if act is None:
        return None
    return MLPSpec(hidden_size=width, intermediate_size=padded_size(inner), act=act, names=names)


def _products(first: str, second: str, merged: int, hidden_size: int) -> tuple[ConnectorStep, ...]:
    return (
        LinearSpec(name=first, in_features=merged, out_features=merged, bias=True),
        ActivationSpec(act="gelu_erf"),
        LinearSpec(name=second, in_features=merged, out_features=hidden_size, bias=True),
    )


def _merger(vision: Fields, width: int, hidden_size: int, norm: str) -> tuple[ConnectorStep, ...]:
    """Qwen2-VL's and Qwen2.5-VL's."""
    merge = vision.integer("spatial_merge_size", default=2, minimum=1)
    products = _products("visual.merger.mlp.0", "visual.merger.mlp.2", width * merge**2, hidden_size)
    return (_norm("visual.merger.ln_q", width, norm), MergeSpec(num_tokens=merge**2), *products)


def _tower(
    vision: Fields,
    width: int,
    hidden_size: int,
    inner: int,
    mlp: MLPSpec | GatedMLPSpec | None,
    *,
    merger: tuple[ConnectorStep, ...],
    norm: str = "layer",
    has_patch_bias: bool = False,
) -> GridTowerSpec | None:
    """The tower without what a generation has of its own; None for a variant that is not known."""
    heads, patch = vision.integer("num_heads", default=16, minimum=1), vision.get("patch_size")
    channels = vision.integer("in_channels", default=vision.integer("in_chans", default=3))
    frames = vision.get("temporal_patch_size")
    frames = 2 if frames is None else frames
    sizes_known = isinstance(patch, int) and isinstance(frames, int)
    if (
        mlp is None
        or not sizes_known
        or width % (4 * heads)
        or vision.integer("out_hidden_size", default=hidden_size) != hidden_size
    ):
        return None
    rope = vision.get("rope_parameters") or {}
    theta = rope.get("rope_theta", 10000.0)
    attention = EncoderAttentionSpec(
        name="attn",
        hidden_size=width,
        num_heads=heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        bias=True,
        names=_NAMES,
        rope=RopeConfig(theta=theta),
    )
    layers = tuple(
        LayerSpec(
            name=f"visual.blocks.{layer}",
            mixers=(attention,),
            feed_forward=mlp,
            input_norm=_norm("norm1", width, norm),
            feed_forward_norm=_norm("norm2", width, norm),
        )
        for layer in range(vision.integer("depth", minimum=1))
    )
    qkv = FusedRows(module="attn.qkv", parts=tuple((name, width) for name in _NAMES[:3]))
    return GridTowerSpec(
        inputs={
            Modality.IMAGE: ("pixel_values", "image_grid_thw"),
            Modality.VIDEO: ("pixel_values_videos", "video_grid_thw"),
        },
        patch=PatchSpec(
            name="visual.patch_embed.proj",
            hidden_size=width,
            patch_size=patch,
            num_channels=channels,
            num_frames=frames,
            has_bias=has_patch_bias,
        ),
        layers=layers,
        intermediate_size=inner,
        connector=merger,
        merge_size=vision.integer("spatial_merge_size", default=2, minimum=1),
        rope_theta=theta,
        checkpoint=CheckpointNames(fused=(qkv,)),
    )
