"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): norm and mixer in each layer, no attention and no positions."""

from __future__ import annotations

from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.mamba2.config import Mamba2Config

__all__ = ["Mamba2ForCausalLM"]


def make_layer(config: Mamba2Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer: x + mixer(norm(x))."""
    norm = RMSNorm(scope / "norm", config.hidden_size, config.rms_norm_eps)
    cache = config.cache_index(f"backbone.layers.{layer}.mixer")
    return SequentialBlock(input_norm=norm, mixer=Mamba2Mixer(scope / "mixer", config.mixer, cache))


class Mamba2ForCausalLM(DecoderLM):
    """The Mamba-2 network."""

    def __init__(self, config: Mamba2Config, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, body="backbone", embedding="embeddings", norm="norm_f")
