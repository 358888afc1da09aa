"""Networks that read texts and images apart and give both a vector of one space (CLIP, Radford et al. 2021). Free of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields
from quire_models.composite import INHERITED, LanguagePart

__all__ = ["DUAL_ENCODERS", "dual_encoder_part"]

_CLIP_TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77,
}  # fmt: skip
_SIGLIP_TEXT = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 64,
}  # fmt: skip

DUAL_ENCODERS: dict[str, dict[str, int]] = {"CLIPModel": _CLIP_TEXT, "SiglipModel": _SIGLIP_TEXT}
"""Architecture -> fields of its `text_config` where config.json leaves them out, as Transformers' classes begin."""


def dual_encoder_part(values: Mapping[str, Any], source: str) -> LanguagePart | None:
    """The part of a config.json that reads texts; None for other networks.

    Args:
        values: The file.
        source: Where it comes from, for messages.
    """
    names = values.get("architectures")
    name = next((str(name) for name in names if str(name) in DUAL_ENCODERS), "") if isinstance(names, list) else ""
    if not name:
        return None
    said = values.get("text_config")
    text = {key: value for key, value in (said if isinstance(said, Mapping) else {}).items() if value is not None}
    whole = {key: values[key] for key in INHERITED if values.get(key) is not None}
    own = {"projection_dim": values.get("projection_dim") or 512} if name == "CLIPModel" else {}
    return LanguagePart(
        Fields({**DUAL_ENCODERS[name], **whole, **text, **own}, f"{source}: text_config"), name, "text_config"
    )
