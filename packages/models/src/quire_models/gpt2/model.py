"""GPT-2 (Radford et al. 2019): pre-norm with layer norms, learned positions, matrices stored inputs first."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.gpt2.config import GPT2Config
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.linear import Embedding
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["GPT2LMHeadModel"]

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Matrices stored as [inputs, outputs]."""


def make_layer(config: GPT2Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    return SequentialBlock(
        input_norm=LayerNorm(scope / "ln_1", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "attn", scale=scale, rotated=False, out="c_proj"),
        feed_forward_norm=LayerNorm(scope / "ln_2", hidden, eps),
        feed_forward=MLP(
            scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=("c_fc", "c_proj")
        ),
    )


class GPT2LMHeadModel(DecoderLM):
    """The GPT-2 network."""

    def __init__(self, config: GPT2Config, scope: Scope) -> None:
        super().__init__(
            config, scope, make_layer, LayerNorm, body="transformer", embedding="wte", layers="h", norm="ln_f"
        )
        self.positions = Embedding(self.body / "wpe", config.max_model_len, config.hidden_size)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Tokens and positions."""
        return super().embed(batch) + self.positions(batch.positions)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The first checkpoints have no prefix, and hold the causal mask."""
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return ()
        if not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        size = self.config.hidden_size
        return split_rows(name, tensor, {"c_attn": {"q_proj": size, "k_proj": size, "v_proj": size}})
