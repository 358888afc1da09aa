"""Products with weights in the network's dtype, and embeddings.

Shape legend: N rows, T tokens, I inputs, O outputs, H heads. A weight is [outputs, inputs].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.activations import GATED_ACTIVATIONS
from quire_ops.norms import rms_norm
from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = [
    "embedding",
    "gated_linear",
    "head_linear",
    "linear",
    "linear_add",
    "lm_head",
    "lm_head_argmax",
    "norm_linear",
    "torch_head_linear",
    "torch_lm_head",
]


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias; x [N, I], weight [O, I], bias [O], all of one dtype -> [N, O] of that dtype."""
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)


@op
def lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, kept as wide as it is summed; x [N, I], weight [vocab, I] of x's dtype -> [N, vocab] float32."""
    return (x.double() @ weight.double().T).float()


@op
def lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Token with the largest logit of op `lm_head`, the lowest id among equals, and that logit; x [N, I],
    weight [vocab, I] of x's dtype -> ids [N] int64, max_logits [N] float32. A row with NaN has the max_logit NaN and
    any token. Logits need not be written anywhere."""
    max_logits, ids = lm_head(x, weight).max(dim=-1)  # torch promises the first of equals
    return ids, max_logits


@op
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x[t, h] @ weight[h].T, a matrix for each head; x [T, H, I], weight [H, O, I], of one dtype -> [T, H, O]. A weight
    is fastest to read where the numbers of a head lie without gaps; heads may be apart."""
    return torch.einsum("thi,hoi->tho", x.double(), weight.double()).to(x.dtype)


@op
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`linear` with a weight whose first outputs are the gate's and the others up's, then `silu_and_mul` or
    `gelu_and_mul` (activation: a name in `GATED_ACTIVATIONS`); products are rounded to the compute dtype. Optional:
    where no backend has it, networks call the other ops. x [N, I], weight [2 * O, I], bias [2 * O] -> [N, O], dtype of
    x."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return GATED_ACTIVATIONS[activation](gate, up)


@op
def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """`linear` of op `rms_norm`, or with an activation `gated_linear` of it; the norm need not be rounded to the
    compute dtype before the product. Optional: where no backend has it, networks call the other ops. Meant for one row,
    whose time is that of reading the weight. x [N, I], norm_weight [I], weight [O, I] or [2 * O, I], bias likewise ->
    [N, O], dtype of x."""
    normed = rms_norm(x.double(), norm_weight, eps)
    if activation is None:
        return linear(normed, weight, bias).to(x.dtype)
    gate, up = linear(normed, weight, bias).to(x.dtype).chunk(2, dim=-1)
    return GATED_ACTIVATIONS[activation](gate, up)


@op
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + `linear`, rounded once. Optional, and meant for one row, as `norm_linear` is. x [N, I], weight [O, I],
    bias [O], residual [N, O] -> [N, O], dtype of x; residual stays as it is."""
    return (residual.double() + linear(x.double(), weight, bias)).to(x.dtype)


@op
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids[t]] for each token; ids [T] int64, weight [vocab, I] -> [T, I], dtype of weight."""
    return torch.stack([weight[token] for token in ids.tolist()]) if len(ids) else weight[:0]


@torch_backend_for(linear)
def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@torch_backend_for(lm_head)
def torch_lm_head(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded to the compute dtype in between where torch writes no other, as on the CPU and on AMD's GPUs."""
    if x.is_cuda and x.dtype != torch.float32 and torch.version.hip is None:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight).float()


@torch_backend_for(lm_head_argmax)
def _torch_lm_head_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    max_logits, ids = torch_lm_head(x, weight).max(dim=-1)
    return ids, max_logits


@torch_backend_for(head_linear)
def torch_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Neither needs to be contiguous."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


@torch_backend_for(embedding)
def _torch_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)
