"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on query, key and value, windows in some layers."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope
from quire_models.llama.model import make_llama_layer

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(DecoderLM):
    """The Qwen2 network; its biases are in `config.qkv_bias`, its windows in `config.sliding_windows`."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)
