"""A pooler computed in float64 step by step, for comparing networks with Transformers without quire-pooling's code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_models.layers.network import Network
from quire_pooling.spec import DenseSpec, PoolingHeadSpec

__all__ = ["head_outputs", "logits_of_text", "logits_of_tokens"]

FUNCTIONS = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "gelu_erf": torch.nn.functional.gelu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "log1p_relu": lambda x: x,  # Transformers' classes give logits
}


def head_outputs(head: PoolingHeadSpec, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """x [N, in_features] -> [N, out_features] float64, without the activation log1p_relu."""
    x = x.double()
    for step in head.steps:
        weight = weights[step.weight].double()
        bias = None if step.bias is None else weights[step.bias].double()
        if isinstance(step, DenseSpec):
            x = FUNCTIONS[step.activation](torch.nn.functional.linear(x, weight, bias))
        else:
            x = torch.nn.functional.layer_norm(x, (step.size,), weight, bias, step.eps)
    return x


def logits_of_text(network: Network, hidden: Tensor) -> Tensor:
    """Hidden states [tokens, hidden_size] of one text -> its logits, [classes]."""
    pooler = network.config.network.pooler
    assert pooler is not None
    hidden = head_outputs(pooler.token_head, network.head_weights, hidden)
    pooled = {"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0)}[pooler.methods[0]]
    return head_outputs(pooler.head, network.head_weights, pooled[None])[0]


def logits_of_tokens(network: Network, hidden: Tensor) -> Tensor:
    """Hidden states [tokens, hidden_size] of one text -> logits of each token, [tokens, classes]."""
    pooler = network.config.network.pooler
    assert pooler is not None
    head = pooler.token_head if pooler.token_head.steps else pooler.head
    return head_outputs(head, network.head_weights, hidden)
