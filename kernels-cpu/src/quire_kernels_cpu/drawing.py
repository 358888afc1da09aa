"""Ops `draw` and `draw_masked` by the compiled kernels (`csrc/sample.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import DrawTable, ops

__all__ = ["Table", "draw", "draw_masked"]


class Table(ctypes.Structure):
    """`DrawTable` of `csrc/sample.h`."""

    _fields_ = (
        ("draws", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("num_prompt_tokens", ctypes.c_void_p),
        ("inv_temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_log2", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, table: DrawTable) -> Table:
        """The addresses of what `table` holds."""
        return cls(*(getattr(table, name).data_ptr() for name, _ in cls._fields_))


@backend_for(ops.draw)
def draw(logits: Tensor, rows: Tensor, positions: Tensor, table: DrawTable) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    peaks = torch.empty(len(logits), dtype=torch.float32)
    addresses = Table.of(table)
    library().quire_draw(
        logits.data_ptr(),
        logits.shape[1],
        rows.data_ptr(),
        positions.data_ptr(),
        len(logits),
        ctypes.byref(addresses),
        tokens.data_ptr(),
        peaks.data_ptr(),
    )
    return tokens, peaks


@backend_for(ops.draw_masked)
def draw_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: DrawTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    peaks = torch.empty(len(logits), dtype=torch.float32)
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
        peaks.data_ptr(),
    )
    return tokens, peaks
