"""XGLM (Lin et al. 2021): OPT with GELU, a scaled embedding and sinusoidal positions."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.biogpt.model import make_layer
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.opt.config import POSITION_OFFSET
from quire_models.xglm.config import XGLMConfig

__all__ = ["XGLMForCausalLM"]


class XGLMForCausalLM(DecoderLM):
    """The XGLM network."""

    def __init__(self, config: XGLMConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, LayerNorm, norm="layer_norm")
        self.factor = config.hidden_size**0.5 if config.scale_embedding else 1.0
        half = config.hidden_size // 2
        # Wavelengths from 2 pi to 10000 * 2 pi, both ends included.
        exponents = torch.arange(half, dtype=torch.float32, device=scope.device) / (half - 1)
        self.frequencies = 10000.0**-exponents

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Tokens, scaled, and positions: all sines, then all cosines."""
        angles = (batch.positions + POSITION_OFFSET).float()[:, None] * self.frequencies
        positions = torch.cat((angles.sin(), angles.cos()), dim=-1).to(self.dtype)
        return super().embed(batch) * self.factor + positions
