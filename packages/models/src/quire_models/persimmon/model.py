"""Persimmon (Adept 2023): squared ReLU, layer-normalised heads, partial rotation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_heads
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.persimmon.config import PersimmonConfig

__all__ = ["PersimmonForCausalLM"]


def make_layer(config: PersimmonConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    inner, hidden, eps = scope / "self_attn", config.hidden_size, config.rms_norm_eps
    norms = None
    if config.qk_layernorm:
        query_norm = LayerNorm(inner / "q_layernorm", config.head_dim, eps)
        norms = HeadNorms(query_norm, LayerNorm(inner / "k_layernorm", config.head_dim, eps))
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return SequentialBlock(
        input_norm=LayerNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, inner, norms=norms, out="dense"),
        feed_forward_norm=LayerNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=names),
    )


class PersimmonForCausalLM(DecoderLM):
    """The Persimmon network."""

    def __init__(self, config: PersimmonConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, LayerNorm, norm="final_layernorm")

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes heads apart."""
        config = self.config
        return split_heads(name, tensor, "query_key_value", head_dim=config.head_dim, num_kv_heads=config.num_kv_heads)
