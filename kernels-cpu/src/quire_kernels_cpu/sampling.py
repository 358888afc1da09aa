"""Ops `sample` and `sample_masked` by the compiled kernels (`csrc/sample.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import SampleTable, ops

__all__ = ["Table", "sample", "sample_masked"]


class Table(ctypes.Structure):
    """`SampleTable` of `csrc/sample.h`."""

    _fields_ = (
        ("do_sample", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("num_prompt_tokens", ctypes.c_void_p),
        ("inv_temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_log2", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, table: SampleTable) -> Table:
        """The addresses of what `table` holds."""
        return cls(*(getattr(table, name).data_ptr() for name, _ in cls._fields_))


@backend_for(ops.sample)
def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    max_logits = torch.empty(len(logits), dtype=torch.float32)
    addresses = Table.of(table)
    library().quire_draw(
        logits.data_ptr(),
        logits.shape[1],
        rows.data_ptr(),
        positions.data_ptr(),
        len(logits),
        ctypes.byref(addresses),
        tokens.data_ptr(),
        max_logits.data_ptr(),
    )
    return tokens, max_logits


@backend_for(ops.sample_masked)
def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    max_logits = torch.empty(len(logits), dtype=torch.float32)
    addresses = Table.of(table)
    library().quire_draw_masked(
        logits.data_ptr(),
        logits.shape[1],
        rows.data_ptr(),
        positions.data_ptr(),
        len(logits),
        ctypes.byref(addresses),
        mask_of.data_ptr(),
        bitmask.data_ptr(),
        tokens.data_ptr(),
        max_logits.data_ptr(),
    )
    return tokens, max_logits
