"""BioGPT (Luo et al. 2022): OPT with GELU and a scaled embedding."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.biogpt.config import BioGptConfig
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Embedding
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.opt.config import POSITION_OFFSET

__all__ = ["BioGptForCausalLM", "make_layer"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=LayerNorm(scope / "self_attn_layer_norm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn", rotated=False, out="out_proj"),
        feed_forward_norm=LayerNorm(scope / "final_layer_norm", hidden, eps),
        feed_forward=MLP(scope, hidden, config.intermediate_size, act=config.hidden_act),
    )


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
