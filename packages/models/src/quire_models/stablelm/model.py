"""StableLM 2 (Bellagente et al. 2024): Llama with layer norms and partial rotation.

Shape legend: T tokens of the step, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import ParallelBlock, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.stablelm.config import StableLmConfig

__all__ = ["StableLmForCausalLM"]


class HeadLayerNorms:
    """x [T, H, D] -> like x: a layer norm with a weight for each head, stored head by head."""

    def __init__(self, scope: Scope, heads: int, head_dim: int, eps: float) -> None:
        self._norm = LayerNorm(scope, head_dim, eps, weight=False, bias=False)
        self._parameters = [(scope / "norms" / str(head)).parameter("weight", head_dim) for head in range(heads)]
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weight = torch.stack([parameter.take() for parameter in self._parameters])

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x) * self._weight


def make_layer(config: StableLmConfig, layer: int, scope: Scope) -> ParallelBlock | SequentialBlock:
    """One layer."""
    inner, hidden, eps = scope / "self_attn", config.hidden_size, config.rms_norm_eps
    norms = None
    if config.qk_layernorm:
        norms = HeadNorms(
            HeadLayerNorms(inner / "q_layernorm", config.num_heads, config.head_dim, eps),
            HeadLayerNorms(inner / "k_layernorm", config.num_kv_heads, config.head_dim, eps),
        )
    input_norm = LayerNorm(scope / "input_layernorm", hidden, eps)
    attention = SelfAttention(config, layer, inner, norms=norms)
    mlp = GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act)
    if config.use_parallel_residual:
        return ParallelBlock(input_norm=input_norm, mixer=attention, feed_forward=mlp)
    mlp_norm = LayerNorm(scope / "post_attention_layernorm", hidden, eps)
    return SequentialBlock(input_norm=input_norm, mixer=attention, feed_forward_norm=mlp_norm, feed_forward=mlp)


class StableLmForCausalLM(DecoderLM):
    """The StableLM network."""

    def __init__(self, config: StableLmConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, LayerNorm)
