"""MLP speculators (Wertheimer et al. 2024, arXiv:2404.19124): heads in a row, each of which sees the state of the head
before it and the token that this one said.

The first reads the target's hidden state of the last token that was computed. A state is
GELU(norm(projection(state before) + weight * embedding(token))), with the weight of IBM's reference implementation
(fms-extras), by which half of the variance behind the last head is the target's.

Shape legend: N states, H hidden size, I inner size, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.draft_heads.mlp_speculator_config import MLPSpeculatorConfig
from quire_models.layers.network import Network
from quire_models.layers.scope import Parameter, Scope
from quire_ops import ops

__all__ = ["MLPSpeculator"]

EPS = 1e-6


class _Head:
    """One head. Tied heads share parameters."""

    def __init__(
        self, emb: Parameter, proj: Parameter, norm_weight: Parameter, norm_bias: Parameter, lm_head: Parameter
    ) -> None:
        self.parameters = (emb, proj, norm_weight, norm_bias, lm_head)
        self.emb: Tensor
        self.proj: Tensor
        self.norm_weight: Tensor
        self.norm_bias: Tensor
        self.lm_head: Tensor

    def take(self, taken: dict[str, Tensor]) -> None:
        """Take the tensors of the parameters, those that other heads have taken from `taken`."""
        for parameter in self.parameters:
            if parameter.name not in taken:
                taken[parameter.name] = parameter.take()
        self.emb, self.proj, self.norm_weight, self.norm_bias, self.lm_head = (
            taken[parameter.name] for parameter in self.parameters
        )


class MLPSpeculator(Network):
    """All heads."""

    def __init__(self, config: MLPSpeculatorConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        inner, vocab, heads = config.inner_size, config.vocab_size, config.num_heads_ahead
        self._tied, self._scales_input = config.has_tied_heads, config.scales_input
        state_weight = 0.5 ** (0.5 / heads)
        self._token_weight = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        self._linear, self._embed = scope.op(ops.linear), scope.op(ops.embedding)
        self._argmax = scope.op(ops.lm_head_argmax)

        def parameters(i: int) -> tuple[Parameter, Parameter, Parameter, Parameter]:
            return (
                scope.parameter(f"emb.{i}.weight", vocab, inner),
                scope.parameter(f"ln.{i}.weight", inner),
                scope.parameter(f"ln.{i}.bias", inner),
                scope.parameter(f"head.{i}.weight", vocab, inner),
            )

        own = [parameters(i) for i in range(1 if self._tied else heads)]
        projections = [
            scope.parameter(f"proj.{i}.weight", inner, inner if i else config.hidden_size)
            for i in range(min(2, heads) if self._tied else heads)
        ]
        self._heads: list[_Head] = []
        for i in range(heads):
            emb, weight, bias, lm_head = own[min(i, len(own) - 1)]
            self._heads.append(_Head(emb, projections[min(i, len(projections) - 1)], weight, bias, lm_head))
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        taken: dict[str, Tensor] = {}
        for head in self._heads:
            head.take(taken)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The published names ("speculator.emb.0.weight"), with or without the prefix. Of tied heads, whichever the
        file has, which may be all of them."""
        name = name.removeprefix("speculator.")
        part, _, rest = name.partition(".")
        number, _, last = rest.partition(".")
        if self._tied and number.isdigit():
            number = str(min(int(number), int(part == "proj")))
        return ((f"{part}.{number}.{last}", tensor) if last else (name, tensor),)

    @torch.inference_mode()
    def draft(self, hidden: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """The most likely tokens, head after head.

        Args:
            hidden: [N, H] states of the target behind its final norm, of the tokens before the last known ones.
            token_ids: [N] int64 last known tokens.
            depth: Tokens to draft, at most as many as there are heads.

        Returns:
            [N, depth] int64.
        """
        state, tokens = hidden, list[Tensor]()
        if self._scales_input:
            state = _normed(state) / math.sqrt(2)
        for head in self._heads[:depth]:
            state = self._linear(state, head.proj, None) + self._token_weight * self._embed(token_ids, head.emb)
            state = F.gelu(head.norm_weight * _normed(state) + head.norm_bias)
            token_ids = self._argmax(state, head.lm_head)[0]
            tokens.append(token_ids)
        return torch.stack(tokens, dim=1)


def _normed(x: Tensor) -> Tensor:
    """Divided by the root of the mean square."""
    numbers = x.float()
    return (numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)
