"""Matrices that a checkpoint keeps as one, taken apart into the projections that networks are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["split_heads", "split_rows"]


def split_rows(name: str, tensor: Tensor, fused: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, Tensor]]:
    """Cut a weight or bias whose module is in `fused` along its outputs.

    Args:
        name: The tensor's name in the checkpoint, `<prefix>.<module>.weight` or `.bias`.
        fused: Name of a module -> names and outputs of its parts, in the order in which they are stored.

    Returns:
        Names and views. A tensor that is not fused, or does not have these sizes, comes back as it is.
    """
    prefix, _, kind = name.rpartition(".")
    outer, _, module = prefix.rpartition(".")
    parts = fused.get(module)
    if parts is None or sum(parts.values()) != tensor.shape[0]:
        return ((name, tensor),)
    pieces = torch.split(tensor, list(parts.values()))
    return [(f"{outer}.{part}.{kind}", piece) for part, piece in zip(parts, pieces, strict=True)]


def split_heads(
    name: str, tensor: Tensor, module: str, *, head_dim: int, num_kv_heads: int, queries_per_kv_head: int = 1
) -> Iterable[tuple[str, Tensor]]:
    """Take apart queries, keys and values that are stored group by group: the query heads of a key-value head, its key
    head, its value head.

    Returns:
        `q_proj`, `k_proj` and `v_proj` in place of `module`; a tensor of another module or size as it is.
    """
    prefix, _, kind = name.rpartition(".")
    outer, _, last = prefix.rpartition(".")
    heads = num_kv_heads * (queries_per_kv_head + 2)
    if last != module or tensor.shape[0] != heads * head_dim:
        return ((name, tensor),)
    groups = tensor.view(num_kv_heads, queries_per_kv_head + 2, head_dim, *tensor.shape[1:])
    pieces = {"q_proj": groups[:, :-2], "k_proj": groups[:, -2], "v_proj": groups[:, -1]}
    return [(f"{outer}.{part}.{kind}", piece.reshape(-1, *tensor.shape[1:])) for part, piece in pieces.items()]
