"""Apertus (Swiss AI 2025): normalised heads, and xIELU (Huang & Schlag 2024) instead of a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.layers.activations import activation
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["ApertusForCausalLM"]


class XIELU:
    """x [..., I] -> like x: p x^2 + b x above zero, n (exp(min(x, eps)) - 1 - x) + b x below.

    p = softplus(alpha_p), n = b + softplus(alpha_n) (Huang & Schlag 2024, sec. 3).
    """

    def __init__(self, scope: Scope) -> None:
        self._parameters = {
            "alpha_p": scope.parameter("alpha_p", 1),
            "alpha_n": scope.parameter("alpha_n", 1),
            "beta": scope.parameter("beta"),
            "eps": scope.parameter("eps"),
        }
        self._expm1 = activation(scope, "expm1")
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        values = {name: parameter.take() for name, parameter in self._parameters.items()}
        self._beta, self._eps = values["beta"], values["eps"]
        self._above = F.softplus(values["alpha_p"])
        self._below = self._beta + F.softplus(values["alpha_n"])

    def __call__(self, x: Tensor) -> Tensor:
        above = self._above * x * x
        below = (self._expm1(torch.minimum(x, self._eps)) - x) * self._below
        return torch.where(x > 0, above, below) + self._beta * x


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    inner, hidden, eps = scope / "self_attn", config.hidden_size, config.rms_norm_eps
    norms = HeadNorms(
        RMSNorm(inner / "q_norm", config.head_dim, eps),
        RMSNorm(inner / "k_norm", config.head_dim, eps),
    )
    mlp, names = scope / "mlp", ("up_proj", "down_proj")
    return SequentialBlock(
        input_norm=RMSNorm(scope / "attention_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, inner, norms=norms),
        feed_forward_norm=RMSNorm(scope / "feedforward_layernorm", hidden, eps),
        feed_forward=MLP(mlp, hidden, config.intermediate_size, act=XIELU(mlp / "act_fn"), bias=False, names=names),
    )


class ApertusForCausalLM(DecoderLM):
    """The Apertus network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
