"""Networks that read texts and images apart and give both a vector of one space (CLIP, Radford et al. 2021): their
parts of config.json. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import CheckpointError, Fields, Modality
from quire_models.composite import INHERITED, LanguagePart
from quire_models.media_spec import MediaSpec
from quire_models.towers import clip

__all__ = ["image_spec", "text_part"]

_CLIP_TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77,
}  # fmt: skip
_SIGLIP_TEXT = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64,
}  # fmt: skip
_TEXT_DEFAULTS = {"CLIPModel": _CLIP_TEXT, "SiglipModel": _SIGLIP_TEXT}
"""Architecture -> fields of its `text_config` where config.json leaves them out, as Transformers' classes begin."""
_TOWERS = {"CLIPModel": clip.spec, "SiglipModel": clip.spec_of_siglip}


def text_part(values: Mapping[str, Any], source: str) -> LanguagePart:
    """The part of a config.json that reads texts.

    Args:
        values: The file.
        source: Where it comes from, for messages.
    """
    name, said = str(values["architectures"][0]), values.get("text_config")
    text = {key: value for key, value in (said if isinstance(said, Mapping) else {}).items() if value is not None}
    whole = {key: values[key] for key in INHERITED if values.get(key) is not None}
    own = {"projection_dim": values.get("projection_dim") or 512} if name == "CLIPModel" else {}
    fields = Fields({**_TEXT_DEFAULTS[name], **whole, **text, **own}, f"{source}: text_config")
    return LanguagePart(fields, name, "text_config")


def image_spec(
    values: Mapping[str, Any], architecture: str, hidden_size: int, text: Fields, *, is_native: bool
) -> MediaSpec:
    """The tower of a config.json; arguments as of `media_spec`.

    Raises:
        CheckpointError: It is of a variant that is not described.
    """
    tower = _TOWERS[architecture](values)
    if tower is None:
        raise CheckpointError(f"{text.source}: the vision_config of this {architecture} is not supported")
    return MediaSpec(architecture=architecture, modalities=(Modality.IMAGE,), width=tower.out_features, tower=tower)
