"""Mixture-of-experts layers by the compiled kernels: op `fused_moe`, whole and in two.

Knows the C interface of experts and where their tensors are; the arithmetic is in `csrc/moe.h`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_kernels_cpu.matrix import matrix_argument
from quire_ops import EXPERT_ACTIVATIONS, Experts, RunExpertOutputs, RunExperts, ops

__all__ = ["CompiledExperts", "expert_outputs", "fused_moe", "moe_sum"]


@backend_for(ops.fused_moe)
def fused_moe(experts: Experts) -> RunExperts:
    return CompiledExperts(experts)


@backend_for(ops.expert_outputs)
def expert_outputs(experts: Experts) -> RunExpertOutputs:
    return CompiledExperts(experts).outputs


@backend_for(ops.moe_sum)
def moe_sum(values: Tensor, topk_ids: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, k, width = values.shape
    values, topk_weights, order = values.contiguous(), topk_weights.contiguous(), topk_ids.argsort(dim=1).contiguous()
    out = torch.empty(tokens, width, dtype=dtype)
    addresses = (each.data_ptr() for each in (values, topk_weights, order))
    library().quire_moe_sum(DTYPES[dtype], *addresses, tokens, k, width, out.data_ptr())
    return out


class CompiledExperts:
    """Experts of the library. Keeps the weights that it points to."""

    def __init__(self, experts: Experts) -> None:
        self._handle: int | None = None
        self._library = library()  # says why when there is none
        self._experts = experts
        self._width, self._inner = len(experts.down[0].weight), len(experts.gate[0].weight)
        matrices: list[ctypes.Structure] = []
        for gate, up, down in zip(experts.gate, experts.up, experts.down, strict=True):
            for weights, inputs in ((gate, self._width), (up, self._width), (down, self._inner)):
                assert weights.weight.is_contiguous(), "an expert's matrix must be contiguous"
                matrices.append(matrix_argument(*weights[:5], inputs=inputs))
        self._matrices = (STRUCTS["MatrixArgument"] * len(matrices))(*matrices)
        self._dtype: int | None = None  # of the tokens; quantized weights do not say

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.quire_moe_delete(self._dtype, self._handle)

    def handle(self, dtype: torch.dtype) -> int:
        """What the C functions take, for tokens of this dtype: the same each time."""
        if self._handle is None:
            self._dtype = DTYPES[dtype]
            self._handle = self._library.quire_moe_new(
                self._dtype,
                len(self._experts.gate),
                self._matrices,
                self._width,
                self._inner,
                EXPERT_ACTIVATIONS.index(self._experts.activation),
                self._experts.limit,
            )
        assert self._dtype == DTYPES[dtype]
        return self._handle

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `RunExperts`."""
        handle = self.handle(x.dtype)
        x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
        out = torch.empty_like(x)
        if len(x):
            self._library.quire_moe_run(
                self._dtype,
                handle,
                x.data_ptr(),
                topk_ids.data_ptr(),
                topk_weights.data_ptr(),
                x.shape[0],
                topk_ids.shape[1],
                out.data_ptr(),
            )
        return out

    def outputs(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """See `RunExpertOutputs`."""
        handle = self.handle(x.dtype)
        x, expert_ids = x.contiguous(), expert_ids.contiguous()
        out = torch.empty_like(x, dtype=torch.float32)
        if len(x):
            ones = torch.ones(len(x))
            addresses = (each.data_ptr() for each in (x, expert_ids, ones))
            self._library.quire_moe_outputs(self._dtype, handle, *addresses, len(x), out.data_ptr())
        return out
