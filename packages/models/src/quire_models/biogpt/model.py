"""BioGPT (Luo et al. 2022): OPT with GELU and a scaled embedding."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.biogpt.config import BioGptConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Embedding
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.opt.config import POSITION_OFFSET
from quire_models.opt.model import make_layer

__all__ = ["BioGptForCausalLM"]


class BioGptForCausalLM(DecoderLM):
    """The BioGPT network."""

    def __init__(self, config: BioGptConfig, scope: Scope) -> None:
        super().__init__(
            config, scope, make_layer, LayerNorm, body="biogpt", norm="layer_norm", head="output_projection"
        )
        rows = config.max_model_len + POSITION_OFFSET
        self.positions = Embedding(self.body / "embed_positions", rows, config.hidden_size)
        self.factor = config.hidden_size**0.5 if config.scale_embedding else 1.0

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Tokens, scaled, and positions."""
        return super().embed(batch) * self.factor + self.positions(batch.positions + POSITION_OFFSET)
