"""Ops `sample` and `sample_masked` by the compiled kernels (`csrc/sample.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import SampleTable, ops

__all__ = ["sample", "sample_masked", "sample_table"]


def sample_table(table: SampleTable) -> ctypes.Structure:
    """The table as the C interface takes it. Does not keep the tensors that it points to."""
    struct = STRUCTS["SampleTable"]
    return struct(**{name: getattr(table, name).data_ptr() for name, _ in struct._fields_})  # type: ignore[misc]


@backend_for(ops.sample)
def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    return _sample(logits, rows, positions, table)


@backend_for(ops.sample_masked)
def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    return _sample(logits, rows, positions, table, mask_of.data_ptr(), bitmask.data_ptr())


def _sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: SampleTable,
    mask_of: int | None = None,
    mask_bits: int | None = None,
) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    max_logits = torch.empty(len(logits), dtype=torch.float32)
    addresses = sample_table(table)
    library().quire_sample(
        logits.data_ptr(),
        logits.shape[1],
        rows.data_ptr(),
        positions.data_ptr(),
        len(logits),
        ctypes.byref(addresses),
        mask_of,
        mask_bits,
        tokens.data_ptr(),
        max_logits.data_ptr(),
    )
    return tokens, max_logits
