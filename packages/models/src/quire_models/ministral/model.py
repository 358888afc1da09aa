"""Ministral (Mistral AI 2024): Mistral with windows in some layers."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope
from quire_models.llama.model import make_llama_layer

__all__ = ["MinistralForCausalLM"]


class MinistralForCausalLM(DecoderLM):
    """The Ministral network; the windows are in `config.sliding_windows`."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)
