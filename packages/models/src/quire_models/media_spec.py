"""What a checkpoint's towers are, from its config.json alone. Free of torch.

Knows which media a network takes and how its language model places them; does not know how media are prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.pooling_heads import tower_class
from quire_models.towers.registry import tower_spec
from quire_models.towers.tower_spec import TowerSpec

__all__ = ["MediaSpec", "cross_attention_layers", "media_refusal", "media_spec"]

_FIELDS: dict[Modality, tuple[str, ...]] = {
    Modality.IMAGE: (
        "vision_config", "vision_tower", "mm_vision_tower", "visual", "vq_config", "image_token_id",
        "image_token_index",
    ),
    Modality.VIDEO: ("video_token_id", "video_token_index"),
    Modality.AUDIO: ("audio_config", "speech_config", "audio_token_id", "audio_token_index"),
}  # fmt: skip
"""Modality -> fields of config.json, one of which a network has that takes it."""

_MODALITIES_BY_TOWER = ("gemma4", "muse_spark")
"""`model_type` of networks whose config.json names tokens of modalities that they have no tower for."""

_TEXT_PROMPTED = "its connector reads the text of the prompt beside the image"
_CROSS_ATTENTION = "some of its layers attend to an image's patches (cross attention)"
_PREFIX = "the tokens of an image and of the prompt all see one another"

_FRAMES_AS_IMAGES = frozenset({"internvl", "qianfan_ocr", "smolvlm"})
"""`model_type` of networks whose processors make images of the frames of a video: they have no token for videos."""

_PREFIX_LMS = frozenset({"paligemma"})
"""`model_type` of networks in which all tokens of a prompt with an image see one another."""

_ADDED = frozenset({"voxtral_realtime"})
"""`model_type` of networks that hear while they write: each token's embedding is added to that of its part of the
sound."""

UNSERVED: dict[str, str] = {
    "blip": _CROSS_ATTENTION,
    "gemma4_unified": "Transformers lets the tokens of its images see one another by two rules, which differ",
    "git": _PREFIX,
    "idefics": _CROSS_ATTENTION,
    "instructblip": _TEXT_PROMPTED,
    "instructblipvideo": _TEXT_PROMPTED,
    "lfm3_vl": "its language model keeps states between tokens, which runs without towers only",
    "minicpmv4_7": "the slices of an image share one canvas of positions",
    "molmo2": "the tokens of all images of a prompt see one another",
    "vibevoice_asr": "its tower adds noise to what it hears",
}
"""`model_type` of networks whose media are not served -> the reason. Their text is, where their language model runs."""

_OWN_TOWERS = frozenset({"HCXVisionV2ForCausalLM"})
"""Classes that came with code of their own for their towers; their text is served."""


_TOWER_OF_TIMM = {"fast_vlm": "timm_wrapper", "gemma3n": "gemma3n_vision", "perception_lm": "timm_wrapper"}
"""`model_type` of networks -> that of their vision tower, where the package timm has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpec:
    """The towers of a network, and how the language model takes what they give."""

    architecture: str
    """Class of Transformers that has the towers."""
    modalities: tuple[Modality, ...]
    width: int
    """Width of an embedding: that of the residual stream, times 1 + the number of `deepstack_layers`; of the keys and
    values of all `cross_attention_layers`, where there are any."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers in front of which further features are added, in the order of an embedding (Bai et al. 2025, "Qwen3-VL",
    DeepStack)."""
    cross_attention_layers: tuple[int, ...] = ()
    """Layers in which tokens attend to an item's embeddings; no token takes them then (Grattafiori et al. 2024, "The
    Llama 3 Herd of Models", sec. 7.2)."""
    is_added: bool = False
    """The embeddings of a sound are added to those of tokens, one for each from the first token of the prompt on, those
    that are generated included; the text ends where the sound does."""
    has_mrope: bool = False
    """Tokens have positions on several axes (M-RoPE, Wang et al. 2024, "Qwen2-VL", sec. 2.1)."""
    num_parameters: int = 0
    """Weights of the towers, connectors included, as far as files are there to be counted."""
    tower: TowerSpec | None = None
    """The tower, where it is Quire's own, for all modalities; None where Transformers' serves."""
    linear_method: str = "plain"
    """How linear layers of a tower of Quire's own and of its connectors keep their weights: a linear method's name."""
    is_bidirectional: bool = False
    """Tokens of an image attend to all of the image, not only to those before them."""
    is_prefix_lm: bool = False
    """So do all tokens of a prompt with an image, to all of the prompt (prefix LM, Beyer et al. 2024, "PaliGemma",
    sec. 3.1)."""
    has_causal_global_layers: bool = False
    """They do so in layers with a sliding window alone (Gemma 4)."""
    causal_token_ids: tuple[int, ...] = ()
    """Tokens that stand for media and attend to those before them all the same: sounds, beside such images."""


def media_refusal(values: Mapping[str, Any]) -> str:
    """Why the media that a config.json speaks of are not served; empty where they are, or there are none.

    Args:
        values: The file.
    """
    model_type, tower = str(values.get("model_type")), values.get("vision_config")
    own = tower.get("model_type") if isinstance(tower, Mapping) else None
    needed = _TOWER_OF_TIMM.get(model_type)
    if needed is not None and own in (None, needed) and find_spec("timm") is None:
        return "its vision tower is one of the package timm, which is not installed"
    if _OWN_TOWERS.intersection(map(str, values.get("architectures") or ())):
        return "its towers came with code of their own"
    return UNSERVED.get(model_type, "")


def media_spec(
    values: Mapping[str, Any], architecture: str, hidden_size: int, text: Fields, *, is_native: bool
) -> MediaSpec | None:
    """The towers that a config.json speaks of; None for a language model alone, and for towers that are not served.

    Args:
        values: The file.
        architecture: Its class.
        hidden_size: Width of the language model.
        text: The language model's part.
        is_native: The language model is Quire's own, and may have a tower of Quire's own.
    """
    inner = values.get("thinker_config")
    values = inner if isinstance(inner, Mapping) else values
    modalities = _modalities(values)
    if not modalities or media_refusal(values):
        return None
    deepstack = _deepstack_layers(values)
    bidirectional = text.get("use_bidirectional_attention") == "vision"
    cross = cross_attention_layers(text)
    prefix_lm = values.get("model_type") in _PREFIX_LMS
    tower = tower_spec(values, hidden_size) if is_native else None
    takes_all = tower is not None and tower.inputs.keys() >= set(modalities)
    return MediaSpec(
        architecture=tower_class(architecture),
        modalities=modalities,
        width=_cross_width(text, cross) if cross else hidden_size * (1 + len(deepstack)),
        cross_attention_layers=cross,
        deepstack_layers=deepstack,
        tower=tower if takes_all else None,
        is_added=values.get("model_type") in _ADDED,
        has_mrope=_has_mrope(text),
        is_bidirectional=bidirectional or values.get("model_type") == "gemma3" or prefix_lm,
        is_prefix_lm=prefix_lm,
        has_causal_global_layers=bidirectional,
        causal_token_ids=_token_ids(values, ("audio_token_id",)) if bidirectional else (),
    )


def cross_attention_layers(text: Fields) -> tuple[int, ...]:
    """The layers of a language model that attend to media, and to no tokens.

    Args:
        text: Its configuration.
    """
    if text.get("model_type") != "mllama_text_model":
        return ()
    named = text.get("cross_attention_layers")
    layers = (3, 8, 13, 18, 23, 28, 33, 38) if named is None else named
    return tuple(layer for layer in layers if layer < text.integer("num_hidden_layers", default=40))


def _cross_width(text: Fields, layers: tuple[int, ...]) -> int:
    """Numbers of the keys and values of all these layers for an embedding."""
    num_heads = text.integer("num_attention_heads", default=32)
    head_dim = text.integer("hidden_size", default=4096) // num_heads
    return 2 * len(layers) * text.integer("num_key_value_heads", default=8) * head_dim


def _modalities(values: Mapping[str, Any]) -> tuple[Modality, ...]:
    fields = dict(_FIELDS)
    if values.get("model_type") in _MODALITIES_BY_TOWER:
        sees = values.get("vision_config") is not None
        fields = {
            Modality.IMAGE: ("vision_config",),
            Modality.VIDEO: ("video_token_id",) if sees else (),
            Modality.AUDIO: ("audio_config",),
        }
    named = tuple(kind for kind, names in fields.items() if any(values.get(name) is not None for name in names))
    return (*named, Modality.VIDEO) if values.get("model_type") in _FRAMES_AS_IMAGES else named


def _has_mrope(text: Fields) -> bool:
    """Whether rotations, of all layers or of a type of them, have sections for several axes."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    rotations = (rope, *rope.values()) if isinstance(rope, Mapping) else ()
    names = ("mrope_section", "xdrope_section")
    return any(isinstance(each, Mapping) and any(each.get(name) is not None for name in names) for each in rotations)


def _deepstack_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """In front of which layers further features are added: those that config.json names, or the first ones behind the
    first layer."""
    if isinstance(places := values.get("deepstack_layer_map"), list):
        return (*(int(layer) for _, layer in places), *values.get("spatial_target_layers", (12, 15, 18, 21)))
    vision = values.get("vision_config")
    indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return tuple(range(1, len(indexes) + 1)) if isinstance(indexes, list) else ()


def _token_ids(values: Mapping[str, Any], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(values[name] for name in names if isinstance(values.get(name), int))
