"""Mamba (Gu & Dao 2023, arXiv:2312.00752) and Falcon Mamba: norm and mixer in each layer, no attention."""

from __future__ import annotations

from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mamba1 import Mamba1Mixer
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.mamba.config import MambaConfig

__all__ = ["MambaForCausalLM"]


def make_layer(config: MambaConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer: x + mixer(norm(x))."""
    norm = RMSNorm(scope / "norm", config.hidden_size, config.rms_norm_eps)
    return SequentialBlock(input_norm=norm, mixer=Mamba1Mixer(scope / "mixer", config.mixer, layer))


class MambaForCausalLM(DecoderLM):
    """The Mamba network."""

    def __init__(self, config: MambaConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, body="backbone", embedding="embeddings", norm="norm_f")
