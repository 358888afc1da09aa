"""Normalization ops. Shape legend: N rows, I numbers of a row. Results have the dtype of `x`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["add_rms_norm", "layer_norm", "rms_norm", "torch_rms_norm"]


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, eq. 4); x [..., I],
    weight [I] -> [..., I]."""
    wide = x.double()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * weight.double()).to(x.dtype)


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = x + residual, normed = rms_norm(total); x and residual [N, I], weight [I] -> normed and total [N, I]. May
    write total over residual."""
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


@op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (Ba et al. 2016); x [..., I],
    weight and bias [I] -> [..., I]."""
    wide = x.double()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.double()
    return (out if bias is None else out + bias.double()).to(x.dtype)


@torch_backend_for(rms_norm)
def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One fused operator."""
    return F.rms_norm(x, weight.shape, weight, eps)


@torch_backend_for(add_rms_norm)
def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is written over `residual`."""
    residual += x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


@torch_backend_for(layer_norm)
def _torch_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
