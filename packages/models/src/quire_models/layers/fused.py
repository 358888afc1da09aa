"""Tensors of a checkpoint as a network's parameters: ignored, renamed, transposed, taken apart.

Knows what `CheckpointNames` says; does not know files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor

from quire_models.spec import CheckpointNames, FusedRows

__all__ = ["named_tensors"]

_OUTPUTS_LAST = frozenset({"qweight", "qzeros", "scales"})
"""Tensors of GPTQ and AWQ."""
_EACH_OUTPUT = frozenset({"weight", "bias"})
_OF_INPUTS = frozenset({"g_idx", "weight_g_idx", "weight_shape"})


def named_tensors(
    rules: CheckpointNames, head: str, name: str, tensor: Tensor, head_tensors: Container[str] = ()
) -> Iterable[tuple[str, Tensor]]:
    """A tensor of the checkpoint -> name and tensor of each parameter that it is; names without a rule stay.

    Args:
        head: Name of the LM head.
        head_tensors: Names of tensors of a pooling head, which are taken whatever rules ignore.
    """
    prefix = next((prefix for prefix in rules.removed_prefixes if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    if (renamed := rules.rename(name)) in head_tensors:
        return ((renamed, tensor),)
    if name.startswith(rules.ignored_prefixes) or name.endswith(rules.ignored_suffixes):
        return ()
    if rules.default_prefix and not name.startswith((rules.default_prefix, f"{head}.")):
        name = rules.default_prefix + name
    name = rules.rename(name)
    if name in head_tensors:
        return ((name, tensor),)
    if name.startswith(rules.ignored_prefixes):  # an LM head under its published name
        return ()
    if name.endswith(rules.transposed):
        tensor = tensor.t()
    if name in rules.squeezed:
        tensor = torch.squeeze(tensor, 0)
    tensor = tensor[: dict(rules.first_rows).get(name)] if rules.first_rows else tensor
    prefix, _, kind = name.rpartition(".")
    for rows in rules.fused:
        if prefix == rows.module or prefix.endswith(f".{rows.module}"):
            parts = _split_groups(tensor, rows) if rows.groups > 1 else _split(kind, tensor, rows)
            outer = prefix.rpartition(".")[0]
            return [(f"{outer}.{part}.{kind}", each) for part, each in parts.items()] or ((name, tensor),)
    return ((name, tensor),)


def _split(kind: str, tensor: Tensor, fused: FusedRows) -> dict[str, Tensor]:
    """Parts of a weight, a bias, or what quantized layers have, cut along outputs; what is of all outputs or of inputs
    goes to each part. Nothing where sizes are others.

    Args:
        kind: Last part of the tensor's name: "weight", "weight_scale", "qweight", ...
    """
    parts = dict(fused.parts)
    if kind in _OF_INPUTS or (tensor.numel() == 1 and kind not in _EACH_OUTPUT):
        return dict.fromkeys(parts, tensor)
    dim = 1 if kind in _OUTPUTS_LAST else 0
    # Outputs may be packed, or share a block.
    sizes = [size * tensor.shape[dim] / sum(parts.values()) for size in parts.values()]
    is_whole = all(size.is_integer() for size in sizes)
    if not is_whole or (kind in _EACH_OUTPUT and sum(sizes) != sum(parts.values())):
        return {}
    pieces = torch.split(tensor, [int(size) for size in sizes], dim)
    return {part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}


def _split_groups(tensor: Tensor, fused: FusedRows) -> dict[str, Tensor]:
    """Parts that are stored in pieces by turns, such as queries, keys and values head by head. Nothing where sizes are
    others."""
    parts = dict(fused.parts)
    if tensor.shape[0] != fused.groups * sum(parts.values()):
        return {}
    pieces = tensor.unflatten(0, (fused.groups, -1)).split(list(parts.values()), dim=1)
    return {part: piece.reshape(-1, *tensor.shape[1:]) for part, piece in zip(parts, pieces, strict=True)}
