"""What a checkpoint's towers are, from its config.json alone. Free of torch.

Knows which media a network takes and how its language model places them; does not know how media are prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.towers.registry import tower_spec
from quire_models.towers.tower_spec import TowerSpec

__all__ = ["MediaSpec", "media_spec"]

_FIELDS: dict[Modality, tuple[str, ...]] = {
    Modality.IMAGE: (
        "vision_config", "vision_tower", "mm_vision_tower", "visual", "image_token_id", "image_token_index",
    ),
    Modality.VIDEO: ("video_token_id", "video_token_index"),
    Modality.AUDIO: ("audio_config", "speech_config", "audio_token_id", "audio_token_index"),
}  # fmt: skip
"""Modality -> fields of config.json, one of which a network has that takes it."""

_BIDIRECTIONAL = frozenset({"gemma3"})
"""`model_type` of networks in which the tokens of an image also see those behind them in the image."""

_FRAMES_AS_IMAGES = frozenset({"internvl", "qianfan_ocr", "smolvlm"})
"""`model_type` of networks whose processors make images of the frames of a video: they have no token for videos."""

UNSERVED: dict[str, str] = {
    "gemma3n": "its layers take embeddings of token ids of their own",
    "gemma4": "its layers take embeddings of token ids of their own",
    "mllama": "some of its layers attend to an image's patches (cross attention)",
    "phi4_multimodal": "its towers stand in its embedding",
    "ovis2": "the marks around an image have embeddings that its tower gives",
}
"""`model_type` of networks whose text is served, but not their media -> the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """The towers of a network, and how the language model takes what they give."""

    architecture: str
    """Class of Transformers that has the towers."""
    modalities: tuple[Modality, ...]
    width: int
    """Width of an embedding: that of the residual stream, times 1 + `num_deepstack`."""
    num_deepstack: int = 0
    """First layers behind which further features are added (Bai et al. 2025, "Qwen3-VL", DeepStack)."""
    has_mrope: bool = False
    """Tokens have three positions, of time, height and width (M-RoPE, Wang et al. 2024, "Qwen2-VL", sec. 2.1)."""
    num_parameters: int = 0
    """Weights of the towers, connectors included, as far as files are there to be counted."""
    tower: TowerSpec | None = None
    """The tower, where it is Quire's own; None where Transformers' serves."""
    is_bidirectional: bool = False
    """Tokens of an image attend to all of the image, not only to those before them."""


def media_spec(
    values: Mapping[str, Any], architecture: str, hidden_size: int, text: Fields, *, is_native: bool = True
) -> MediaSpec | None:
    """The towers that a config.json speaks of; None for a language model alone, and for towers that are not served.

    Args:
        values: The file.
        architecture: Its class.
        hidden_size: Width of the language model.
        text: The language model's part.
        is_native: The language model is Quire's own; Transformers' takes features at its input alone.
    """
    inner = values.get("thinker_config")
    values = inner if isinstance(inner, Mapping) else values
    found = tuple(kind for kind, names in _FIELDS.items() if any(values.get(name) is not None for name in names))
    if values.get("model_type") in _FRAMES_AS_IMAGES:
        found = (*found, Modality.VIDEO)
    if not found or values.get("model_type") in UNSERVED:
        return None
    vision = values.get("vision_config")
    deepstack = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    depth = len(deepstack) if isinstance(deepstack, list) else 0
    if depth and not is_native:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return MediaSpec(
        architecture=architecture,
        modalities=found,
        width=hidden_size * (1 + depth),
        num_deepstack=depth,
        tower=tower_spec(values, hidden_size) if is_native else None,
        has_mrope=isinstance(rope, Mapping) and rope.get("mrope_section") is not None,
        is_bidirectional=values.get("model_type") in _BIDIRECTIONAL,
    )
