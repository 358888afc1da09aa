"""Command-R (Cohere 2024): attention and feed-forward side by side, layer norms without biases, scaled logits.

Shape legend: T tokens of the step, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_models.cohere.config import CohereConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import ParallelBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["CohereForCausalLM", "make_layer"]


def make_norm(scope: Scope, size: int, eps: float) -> LayerNorm:
    """A layer norm with a weight only."""
    return LayerNorm(scope, size, eps, bias=False)


class HeadLayerNorm:
    """x [T, H, D] -> like x: each head normalised alone, with a weight of its own."""

    def __init__(self, scope: Scope, heads: int, head_dim: int, eps: float) -> None:
        self._norm = LayerNorm(scope, head_dim, eps, weight=False, bias=False)
        self._parameter = scope.parameter("weight", heads, head_dim)
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weight = self._parameter.take()

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x) * self._weight


def make_layer(config: CohereConfig, layer: int, scope: Scope, *, rotated: bool = True) -> ParallelBlock:
    """One layer, which may know no positions."""
    inner, eps = scope / "self_attn", config.rms_norm_eps
    norms = None
    if config.use_qk_norm:
        norms = HeadNorms(
            HeadLayerNorm(inner / "q_norm", config.num_heads, config.head_dim, eps),
            HeadLayerNorm(inner / "k_norm", config.num_kv_heads, config.head_dim, eps),
        )
    return ParallelBlock(
        input_norm=make_norm(scope / "input_layernorm", config.hidden_size, eps),
        mixer=SelfAttention(config, layer, inner, rotated=rotated, interleaved=True, norms=norms),
        feed_forward=GatedMLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act),
    )


class CohereForCausalLM(DecoderLM):
    """The Cohere network."""

    def __init__(
        self, config: CohereConfig, scope: Scope, make_layer: Callable[..., ParallelBlock] = make_layer
    ) -> None:
        """Args:
        make_layer: (config, index of the layer, scope of the layer) -> the layer.
        """
        super().__init__(config, scope, make_layer, make_norm, logits_factor=config.logit_scale)
