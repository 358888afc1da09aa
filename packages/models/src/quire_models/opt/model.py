"""OPT (Zhang et al. 2022): layer norms, learned positions, ReLU."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import PostLNBlock, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Embedding, Linear
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.opt.config import POSITION_OFFSET, OPTConfig

__all__ = ["OPTForCausalLM"]


def make_layer(config: OPTConfig, layer: int, scope: Scope) -> SequentialBlock | PostLNBlock:
    """One layer."""
    hidden = config.hidden_size
    attention = SelfAttention(config, layer, scope / "self_attn", rotated=False, out="out_proj")
    attention_norm = make_norm(config, scope / "self_attn_layer_norm")
    mlp = MLP(scope, hidden, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias)
    mlp_norm = make_norm(config, scope / "final_layer_norm")
    if config.norm_before:
        return SequentialBlock(input_norm=attention_norm, mixer=attention, feed_forward_norm=mlp_norm, feed_forward=mlp)
    return PostLNBlock(mixer=attention, mixer_norm=attention_norm, feed_forward=mlp, feed_forward_norm=mlp_norm)


def make_norm(config: OPTConfig, scope: Scope) -> LayerNorm:
    """A layer norm of the stream, with weights or without."""
    weights = config.norm_weights
    return LayerNorm(scope, config.hidden_size, config.rms_norm_eps, weight=weights, bias=weights)


class OPTForCausalLM(DecoderLM):
    """The OPT network."""

    def __init__(self, config: OPTConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            lambda scope, size, eps: make_norm(config, scope) if config.final_norm else lambda x: x,
            body="model.decoder",
            norm="final_layer_norm",
        )
        rows, hidden, width = config.max_model_len + POSITION_OFFSET, config.hidden_size, config.embedding_width
        self.positions = Embedding(self.body / "embed_positions", rows, hidden)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if width != hidden:
            self.project_in = Linear(self.body / "project_in", width, hidden, method=scope.plain_method)
            self.project_out = Linear(self.body / "project_out", hidden, width, method=scope.plain_method)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Tokens, widened to the hidden size, and positions."""
        x = super().embed(batch)
        if self.project_in is not None:
            x = self.project_in(x)
        return x + self.positions(batch.positions + POSITION_OFFSET)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states in as many dimensions as the embedding has."""
        return hidden if self.project_out is None else self.project_out(hidden)
