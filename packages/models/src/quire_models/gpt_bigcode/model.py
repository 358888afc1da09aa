"""StarCoder (Li et al. 2023): GPT-2 whose query heads share one key-value head."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_heads, split_rows
from quire_models.layers.linear import Embedding
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["GPTBigCodeForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=LayerNorm(scope / "ln_1", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "attn", rotated=False, out="c_proj"),
        feed_forward_norm=LayerNorm(scope / "ln_2", hidden, eps),
        feed_forward=MLP(
            scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=("c_fc", "c_proj")
        ),
    )


class GPTBigCodeForCausalLM(DecoderLM):
    """The StarCoder network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(
            config, scope, make_layer, LayerNorm, body="transformer", embedding="wte", layers="h", norm="ln_f"
        )
        self.positions = Embedding(self.body / "wpe", config.max_model_len, config.hidden_size)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Tokens and positions."""
        return super().embed(batch) + self.positions(batch.positions)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes queries, keys and values apart: all queries first, or head by head where each head has its own keys."""
        config = self.config
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return ()
        if config.num_kv_heads > 1:
            return split_heads(name, tensor, "c_attn", head_dim=config.head_dim, num_kv_heads=config.num_kv_heads)
        parts = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        return split_rows(name, tensor, {"c_attn": parts})
