"""Which architectures there are, as a literal table; modules are imported when first used. Free of torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["ARCHITECTURES", "Architecture", "model_class"]


class Architecture(NamedTuple):
    """Where the network of an architecture is."""

    model_type: str
    module: str
    name: str


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "quire_models.llama.model", "LlamaForCausalLM"),
    "MistralForCausalLM": Architecture("mistral", "quire_models.mistral.model", "MistralForCausalLM"),
    "Qwen2ForCausalLM": Architecture("qwen2", "quire_models.qwen2.model", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": Architecture("qwen3", "quire_models.qwen3.model", "Qwen3ForCausalLM"),
}


def model_class(architecture: str) -> Any:
    """The class of a network; `architecture` is a key of `ARCHITECTURES`."""
    entry = ARCHITECTURES[architecture]
    return getattr(import_module(entry.module), entry.name)
