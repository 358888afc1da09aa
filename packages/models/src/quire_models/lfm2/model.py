"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention in some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import SelfAttention, head_norms
from quire_models.layers.blocks import Mixer, SequentialBlock
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.mixer_shapes import ShortConvShape
from quire_models.recurrent_config import HybridConfig
from quire_ops import QuantizedTokens

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

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.in_proj,)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._cache)
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(c * self.conv(b * inner, state, layout))


def make_layer(config: HybridConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer, with attention or a gated short convolution."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    mixer: Mixer
    if config.attention_layers[layer]:
        inner = scope / "self_attn"
        norms = head_norms(config, inner, names=("q_layernorm", "k_layernorm"))
        mixer = SelfAttention(config, layer, inner, norms=norms, out="out_proj")
    else:
        mixer = GatedShortConvolution(scope / "conv", config.mixer, layer)
    return SequentialBlock(
        input_norm=RMSNorm(scope / "operator_norm", hidden, eps),
        mixer=mixer,
        feed_forward_norm=RMSNorm(scope / "ffn_norm", hidden, eps),
        feed_forward=GatedMLP(scope / "feed_forward", hidden, config.intermediate_size, act=config.hidden_act),
    )


class Lfm2ForCausalLM(DecoderLM):
    """The LFM2 network."""

    def __init__(self, config: HybridConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, norm="embedding_norm")

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Names the parts of the feed-forward networks as other families do."""
        for part, usual in MLP_NAMES.items():
            name = name.replace(f".feed_forward.{part}.", f".feed_forward.{usual}.")
        return ((name, tensor),)
