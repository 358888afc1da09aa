"""Medusa (Cai et al. 2024, arXiv:2401.10774): heads on the hidden state of the last token that was computed, each for
a token further ahead. None sees what the others say.

Shape legend: N states, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.draft_heads.medusa_config import MedusaConfig
from quire_models.layers.linear import LMHead
from quire_models.layers.network import Network
from quire_models.layers.scope import Parameter, Scope
from quire_ops import ops

__all__ = ["MedusaHeads"]

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


class _Block:
    """x + silu(linear(x)) (section 3.1); the linear layer may have a bias."""

    def __init__(self, scope: Scope, size: int) -> None:
        self._linear = scope.op(ops.linear)
        self._parameters = (scope.parameter("weight", size, size), scope.parameter("bias", size, optional=True))
        self._weight: Tensor
        self._bias: Tensor | None
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        weight, bias = self._parameters
        self._weight, self._bias = weight.take(), _taken(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return x + F.silu(self._linear(x, self._weight, self._bias))


def _taken(parameter: Parameter) -> Tensor | None:
    return None if parameter.tensor is None else parameter.take()


class MedusaHeads(Network):
    """All heads."""

    def __init__(self, config: MedusaConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        size, layers = config.hidden_size, config.medusa_layers
        self._layers = layers
        self._heads = [
            (
                [_Block(scope / str(i) / str(layer) / "linear", size) for layer in range(layers)],
                LMHead(scope / str(i) / str(layers), config.vocab_size, size),
            )
            for i in range(config.medusa_heads)
        ]

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The names of the published heads ("0.0.linear.weight"; "0.1.weight" of the LM head behind one block), with or
        without "medusa_head.", or those of converted ones ("blocks.0.layers.0.weight", "lm_heads.0.weight")."""
        if found := _BLOCK.fullmatch(name):
            name = f"{found[1]}.{found[2]}.linear.{found[3]}"
        elif found := _HEAD.fullmatch(name):
            name = f"{found[1]}.{self._layers}.weight"
        return ((name.removeprefix("medusa_head."), tensor),)

    @torch.inference_mode()
    def top(self, hidden: Tensor, head: int, count: int) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] behind the final norm -> log probabilities [N, K] float32 of the `count` tokens that the
        head finds most likely, best first, and the tokens [N, K]."""
        blocks, lm_head = self._heads[head]
        for block in blocks:
            hidden = block(hidden)
        found = torch.log_softmax(lm_head(hidden), dim=-1).topk(min(count, self.config.vocab_size))
        return found.values, found.indices
