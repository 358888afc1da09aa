"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention in some."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope
from quire_models.mixer_shapes import ShortConvShape
from quire_models.recurrent_config import HybridConfig

__all__ = ["GatedShortConvolution", "Lfm2ForCausalLM"]

MLP_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class GatedShortConvolution:
    """x [T, hidden_size] -> [T, hidden_size]: out(c * conv(b * x)) with b, c and x projected."""

    def __init__(self, scope: Scope, shape: ShortConvShape, cache: int) -> None:
        """Args:
        cache: Which cache of the batch has its state.
        """
        hidden = shape.hidden_size
        self.in_proj = Linear(scope / "in_proj", hidden, 3 * hidden, bias=shape.bias)
        self.conv = ShortConvolution(scope / "conv", hidden, shape.conv_kernel, bias=shape.bias)
        self.out_proj = Linear(scope / "out_proj", hidden, hidden, bias=shape.bias)
        self._cache = cache

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._cache)
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(c * self.conv(b * inner, state, layout))


class Lfm2Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: HybridConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.mixer_norm = RMSNorm(scope / "operator_norm", hidden, eps)
        self.attention: SelfAttention | None = None
        if config.attention_layers[layer]:
            inner = scope / "self_attn"
            norms = HeadNorms(
                RMSNorm(inner / "q_layernorm", config.head_dim, eps),
                RMSNorm(inner / "k_layernorm", config.head_dim, eps),
            )
            self.attention = SelfAttention(config, layer, inner, norms=norms, out="out_proj")
        else:
            self.conv = GatedShortConvolution(scope / "conv", config.mixer, layer)
        self.mlp_norm = RMSNorm(scope / "ffn_norm", hidden, eps)
        self.mlp = GatedMLP(scope / "feed_forward", hidden, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.mixer_norm(x)
        x = x + (self.conv(normed, batch) if self.attention is None else self.attention(normed, cos, sin, batch))
        return x + self.mlp(self.mlp_norm(x))


class Lfm2ForCausalLM(RecurrentLM):
    """The LFM2 network."""

    def __init__(self, config: HybridConfig, scope: Scope) -> None:
        super().__init__(config, scope, Lfm2Layer, RMSNorm, norm="embedding_norm")

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Names the parts of the feed-forward networks as other families do."""
        for part, usual in MLP_NAMES.items():
            name = name.replace(f".feed_forward.{part}.", f".feed_forward.{usual}.")
        return ((name, tensor),)
