"""Adapters for the compiled kernels: op `lora_linear`, and the tables that a decoder reads.

Knows the C interface; the arithmetic is in `csrc/lora.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.dtypes import DTYPES
from quire_ops import LoraTokens, LoraWeights, ops

__all__ = ["LoraTables", "lora_linear"]

_FIELDS = ("a", "b", "ranks", "adjusted", "scale", "shift")
"""Of `LoraWeights`, and of `LoraTable` in `csrc/kernels.h`."""
_FORMS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""dtype of narrow matrices -> `LoraForm` in `csrc/lora.h`."""


def _table(weights: LoraWeights | None) -> ctypes.Structure:
    """Does not keep the tensors it points to."""
    if weights is None:
        return STRUCTS["LoraTable"]()
    tensors: dict[str, Tensor] = {name: getattr(weights, name) for name in _FIELDS}
    if weights.a_scale is not None and weights.b_scale is not None:
        tensors |= {"a_scale": weights.a_scale, "b_scale": weights.b_scale}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return STRUCTS["LoraTable"](**pointers, form=_FORMS.get(weights.a.dtype, 0))


class LoraTables:
    """The adapters of several layers as an array of the C interface.

    Args:
        layers: In the order of the array; None for a layer that never has any.
    """

    def __init__(self, layers: Sequence[LoraWeights | None]) -> None:
        self._layers = layers
        self._array = (STRUCTS["LoraTable"] * len(layers))(*map(_table, layers))
        self.address: int | None = None
        """Of the array; None when no layer may have adapters."""
        self.max_rank = 0
        """Rows of a slot."""
        for weights in layers:
            if weights is not None:
                self.address, self.max_rank = ctypes.addressof(self._array), weights.a.shape[1]
                break


@backend_for(ops.lora_linear)
def lora_linear(out: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    if not out.is_contiguous():  # one of several results that lie side by side
        whole = out.contiguous()
        lora_linear(whole, x, weights, tokens)
        out.copy_(whole)
        return
    x, table = x.contiguous(), _table(weights)
    library().quire_lora_linear(
        DTYPES[x.dtype],
        out.dtype == torch.float32,
        out.data_ptr(),
        x.data_ptr(),
        ctypes.addressof(table),
        x.shape[1],
        out.shape[1],
        tokens.order.data_ptr(),
        tokens.groups.data_ptr(),
        len(tokens.groups),
        weights.a.shape[1],
    )
