"""Networks whose towers are Quire's own. Free of torch.

Knows which function describes a network's towers. What is not here, or in a variant that its function does not know,
has Transformers' towers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire_models.towers import gemma3, idefics3, internvl, lfm2_vl, llava, mistral3, qwen_vl, whisper
from quire_models.towers.tower_spec import TowerSpec

__all__ = ["TOWERS", "tower_spec"]

TOWERS: dict[str, Callable[[Mapping[str, Any], int], TowerSpec | None]] = {
    "gemma3": gemma3.spec,
    "idefics3": idefics3.spec,
    "internvl": internvl.spec,
    "lfm2_vl": lfm2_vl.spec,
    "lighton_ocr": mistral3.spec_of_lighton_ocr,
    "llava": llava.spec,
    "mistral3": mistral3.spec,
    "paligemma": gemma3.spec_of_paligemma,
    "qwen2_5_vl": qwen_vl.spec_of_2_5,
    "qwen2_audio": whisper.spec_of_qwen2_audio,
    "qwen2_vl": qwen_vl.spec_of_2,
    "qwen3_5": qwen_vl.spec_of_3,
    "qwen3_5_moe": qwen_vl.spec_of_3,
    "qwen3_vl": qwen_vl.spec_of_3,
    "qwen3_vl_moe": qwen_vl.spec_of_3,
    "qwen4_exp": qwen_vl.spec_of_3,
    "smolvlm": idefics3.spec,
    "voxtral": whisper.spec_of_voxtral,
}
"""`model_type` of a network -> (config.json, hidden size of its language model) -> its tower, or None for a variant
that is not described."""


def tower_spec(values: Mapping[str, Any], hidden_size: int) -> TowerSpec | None:
    """The tower of the network that a config.json is of; None where Transformers' serves."""
    describe = TOWERS.get(str(values.get("model_type")))
    return None if describe is None else describe(values, hidden_size)
