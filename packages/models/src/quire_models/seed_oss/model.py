"""Seed-OSS (ByteDance 2025): Llama with biases on query, key and value."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope
from quire_models.llama.model import make_llama_layer

__all__ = ["SeedOssForCausalLM"]


class SeedOssForCausalLM(DecoderLM):
    """The Seed-OSS network; its biases are in the configuration."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)
