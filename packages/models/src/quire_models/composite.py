"""The language model inside a checkpoint that takes media too: its part of config.json, and its part of the files. Free
of torch.

Knows how such files say where the language model is and what it is; does not know towers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_interfaces import Fields
from quire_models.spec import NetworkSpec
from quire_models.text_defaults import TEXT_DEFAULTS

__all__ = ["LanguageNames", "LanguagePart", "language_names", "language_part"]

TEXT_FIELDS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields of config.json that hold the language model's configuration; a thinker's has a `text_config` in its turn."""

TOWER_FIELDS = (
    "vision_config",
    "audio_config",
    "speech_config",
    "vision_tower",
    "mm_vision_tower",
    "visual",
    "vq_config",
)
"""Fields of config.json that only a checkpoint with towers has."""

INHERITED = (
    "dtype", "torch_dtype", "quantization_config", "compression_config", "bos_token_id", "eos_token_id"
)  # fmt: skip
"""Fields that config.json says once for the whole checkpoint, where the language model's part does not."""

_OF_THE_WHOLE = ("tie_word_embeddings", "default_num_delay_tokens")
"""Fields that hold for the language model as config.json says them of the whole checkpoint, whatever its part says."""

TEXT_TYPES: dict[str, str] = {
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granite_docling_text": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "phi4_multimodal": "Phi3ForCausalLM",
    "voxtral_realtime_text": "MistralForCausalLM",
}
"""`model_type` of a language model that stands in larger checkpoints only -> the architecture that it is."""

MROPE: dict[str, tuple[list[int], bool]] = {
    "ernie4_5_vl_moe_text": ([22, 22, 20], False),
    "qwen3_5_moe_text": ([11, 11, 10], True),
    "qwen3_5_text": ([11, 11, 10], True),
    "qwen3_omni_moe_text": ([24, 20, 20], True),
    "qwen3_vl_moe_text": ([24, 20, 20], True),
    "qwen3_vl_text": ([24, 20, 20], True),
    "qwen4_exp_text": ([11, 11, 10], True),
}
"""`model_type` of a language model -> sections of M-RoPE where its file does not say them, and whether they come by
turns, which the class says."""

_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "ForVisionText2Text", "LMHeadModel")
"""Ends of names of classes that continue texts."""

_WRAPPED = re.compile(r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model|llm|language)\.(?P<rest>.+)")
"""Name of a tensor of the language model, where it has a prefix of its own."""

_LAYERS = ("blocks", "encoder.layers")
"""What layers are called where a class gives all its parts the names of its tower's."""


class LanguagePart(NamedTuple):
    """The language model of a checkpoint of several modalities."""

    config: Fields
    """Its part of config.json, complete."""
    architecture: str
    """The class that it is by itself; empty where Quire has no network of its own for it."""
    field: str
    """Field of config.json that holds its part; empty where its fields stand beside those of the towers."""


def language_part(values: Mapping[str, Any], source: str, native: Mapping[str, str]) -> LanguagePart | None:
    """The language model inside a checkpoint of several modalities; None where there is none that continues texts.

    Args:
        values: config.json.
        source: Where it comes from, for messages.
        native: Architecture -> model_type, of all networks of Quire's own.
    """
    names = values.get("architectures") or []
    if not isinstance(names, list) or not names or any(name in native for name in names):
        return None
    inner, field = values, next((name for name in TEXT_FIELDS if isinstance(values.get(name), Mapping)), "")
    if field:
        inner = values[field]
        if isinstance(of_thinker := inner.get("text_config"), Mapping):
            inner, field = _completed(of_thinker, inner), f"{field}.text_config"
    elif values.get("hidden_size") is None or all(values.get(name) is None for name in TOWER_FIELDS):
        return None
    config = Fields(_completed(inner, values), f"{source}: {field}" if field else source)
    architecture = _architecture(config, native)
    generates = any(str(name).endswith(_GENERATES) for name in names)
    return LanguagePart(config, architecture, field) if architecture or generates else None


def _completed(part: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """A part with what the whole file says, and what its class begins with where neither says it."""
    said = {name: value for name, value in part.items() if value is not None}
    whole = {name: outer[name] for name in INHERITED if outer.get(name) is not None}
    result = {**TEXT_DEFAULTS.get(str(part.get("model_type")), {}), **whole, **said}
    for name in _OF_THE_WHOLE:
        if outer.get(name) is not None:
            result[name] = outer[name]
    if (mrope := MROPE.get(str(part.get("model_type")))) is not None:
        spelled = "rope_parameters" if result.get("rope_parameters") is not None else "rope_scaling"
        rope = {"mrope_section": mrope[0], **(result.get(spelled) or {"rope_type": "default"})}
        result[spelled] = {**rope, "mrope_interleaved": mrope[1]}
    return result


def _architecture(config: Fields, native: Mapping[str, str]) -> str:
    """The decoder of Quire's own that a configuration is of; empty for none."""
    listed, model_type = config.get("architectures"), str(config.get("model_type"))
    decoders = {name: own_type for name, own_type in native.items() if name.endswith(("ForCausalLM", "LMHeadModel"))}
    names = [*(listed if isinstance(listed, list) else ()), TEXT_TYPES.get(model_type)]
    names += [name for name, own_type in decoders.items() if own_type == model_type]
    return next((name for name in names if name in decoders), "")


@dataclass(frozen=True, slots=True)
class LanguageNames:
    """Names of a checkpoint's tensors -> names that the language model has for them by itself."""

    body: str
    """What the names of its body begin with: "model"."""
    head: str
    """Name of its LM head."""
    parts: frozenset[str]
    """What follows in names of its body: "layers", "embed_tokens", "norm"."""
    head_tensors: frozenset[str] = frozenset()
    """Full names of what it has in place of its LM head."""

    def __call__(self, name: str) -> str | None:
        """The language model's own name of a tensor; None for a tensor of a tower."""
        name = name.removeprefix("vlm.")  # of retrievers
        if name in self.head_tensors:
            return name
        if (wrapped := _WRAPPED.fullmatch(name)) is not None:
            rest = wrapped["rest"]
            rest = rest if rest.startswith((f"{self.body}.", f"{self.head}.")) else f"{self.body}.{rest}"
            for layers in _LAYERS if "layers" in self.parts else ():
                if rest.startswith(f"{self.body}.{layers}.") and layers.partition(".")[0] not in self.parts:
                    return rest.replace(layers, "layers", 1)
            return rest
        name = name.removeprefix("thinker.")
        first, _, rest = name.partition(".")
        if name.startswith(f"{self.head}.") or (first == self.body and rest.partition(".")[0] in self.parts):
            return name
        return None


def language_names(network: NetworkSpec) -> LanguageNames:
    """The names of this network in a checkpoint of several modalities."""
    body, _, rest = f"{network.body}.{network.embedding.name}".partition(".")
    weights = (weight.name.partition(".") for weight in network.weights())
    parts = {name.partition(".")[0] for first, _, name in weights if first == body}
    head_tensors = frozenset(() if network.pooler is None else network.pooler.shapes())
    return LanguageNames(body, network.head.name, frozenset({rest.partition(".")[0], *parts}), head_tensors)
