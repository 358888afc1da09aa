"""Mamba (Gu & Dao 2023, arXiv:2312.00752) and Falcon Mamba: norm and mixer in each layer, no attention."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.mamba1 import Mamba1Mixer
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope
from quire_models.mamba.config import MambaConfig

__all__ = ["MambaForCausalLM"]


class MambaLayer:
    """x + mixer(norm(x))."""

    def __init__(self, config: MambaConfig, layer: int, scope: Scope) -> None:
        self.norm = RMSNorm(scope / "norm", config.hidden_size, config.rms_norm_eps)
        self.mixer = Mamba1Mixer(scope / "mixer", config.mixer, layer)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        return x + self.mixer(self.norm(x), batch)


class MambaForCausalLM(RecurrentLM):
    """The Mamba network."""

    def __init__(self, config: MambaConfig, scope: Scope) -> None:
        super().__init__(config, scope, MambaLayer, RMSNorm, body="backbone", embedding="embeddings", norm="norm_f")
