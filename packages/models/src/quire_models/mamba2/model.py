"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): norm and mixer in each layer, no attention and no positions."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope
from quire_models.mamba2.config import Mamba2Config

__all__ = ["Mamba2ForCausalLM"]


class Mamba2Layer:
    """x + mixer(norm(x))."""

    def __init__(self, config: Mamba2Config, layer: int, scope: Scope) -> None:
        self.norm = RMSNorm(scope / "norm", config.hidden_size, config.rms_norm_eps)
        cache = config.cache_index(f"backbone.layers.{layer}.mixer")
        self.mixer = Mamba2Mixer(scope / "mixer", config.mixer, cache)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        return x + self.mixer(self.norm(x), batch)


class Mamba2ForCausalLM(RecurrentLM):
    """The Mamba-2 network."""

    def __init__(self, config: Mamba2Config, scope: Scope) -> None:
        super().__init__(config, scope, Mamba2Layer, RMSNorm, body="backbone", embedding="embeddings", norm="norm_f")
