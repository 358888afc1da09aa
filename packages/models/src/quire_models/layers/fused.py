"""Matrices that a checkpoint keeps as one, taken apart into the projections that networks are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["split_heads", "split_rows"]

_OUTPUTS_LAST = frozenset({"qweight", "qzeros", "scales"})
"""Tensors of GPTQ and AWQ."""
_EACH_OUTPUT = frozenset({"weight", "bias"})
_OF_INPUTS = frozenset({"g_idx", "weight_g_idx", "weight_shape"})


def split_rows(name: str, tensor: Tensor, fused: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, Tensor]]:
    """Cut a tensor of a module in `fused` along its outputs: a weight, a bias, or what quantized layers have.

    Args:
        name: The tensor's name in the checkpoint, `<prefix>.<module>.weight`, `.bias`, `.weight_scale`, `.qweight`, ...
        fused: Name of a module -> names and outputs of its parts, in the order in which they are stored.

    Returns:
        Names and views. What is of all outputs or of inputs goes to each part. A tensor that is not fused, or does not
        have these sizes, comes back as it is.
    """
    prefix, _, kind = name.rpartition(".")
    outer, _, module = prefix.rpartition(".")
    parts = fused.get(module)
    if parts is None:
        return ((name, tensor),)
    if kind in _OF_INPUTS or (tensor.numel() == 1 and kind not in _EACH_OUTPUT):
        return [(f"{outer}.{part}.{kind}", tensor) for part in parts]
    dim = 1 if kind in _OUTPUTS_LAST else 0
    # Outputs may be packed, or share a block.
    sizes = [size * tensor.shape[dim] / sum(parts.values()) for size in parts.values()]
    if not all(size.is_integer() for size in sizes) or (
        kind in ("weight", "bias") and sum(sizes) != sum(parts.values())
    ):
        return ((name, tensor),)
    pieces = [piece.contiguous() for piece in torch.split(tensor, [int(size) for size in sizes], dim)]
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
