"""Op `step_inputs` by the compiled kernels: one call gathers everything."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_kernels_cpu.backend import backend_for
from quire_kernels_cpu.builds import library
from quire_ops import GroupInputs, RowTable, StepInputs, ops
from quire_ops.step_inputs import HostInts

__all__ = ["step_inputs"]


@backend_for(ops.step_inputs)
def step_inputs(
    token_ids: Tensor, tables: tuple[RowTable, ...], rows: HostInts, starts: HostInts, ends: HostInts
) -> StepInputs:
    num_sequences, longest = len(rows), int(ends.max())
    num_tokens = int((ends - starts).sum())
    input_ids = torch.empty(num_tokens, dtype=torch.int64)
    positions = torch.empty(num_tokens, dtype=torch.int64)
    query_start_loc = torch.empty(num_sequences + 1, dtype=torch.int32)
    seq_lens = torch.empty(num_sequences, dtype=torch.int32)
    groups = (STRUCTS["RowTable"] * len(tables))()
    group_inputs = []
    for i, (table, block_size, window) in enumerate(tables):
        num_blocks = -(-longest // block_size)
        block_table = torch.empty(num_sequences, num_blocks, dtype=torch.int32)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        groups[i] = (  # type: ignore[call-overload]  # fills the struct where it is
            table.data_ptr(),
            table.shape[1],
            block_size,
            window or 0,
            block_table.data_ptr(),
            num_blocks,
            slots.data_ptr(),
        )
        group_inputs.append(GroupInputs(block_table, slots))
    library().quire_step_inputs(
        token_ids.data_ptr(),
        token_ids.shape[1],
        rows.ctypes.data,
        starts.ctypes.data,
        ends.ctypes.data,
        num_sequences,
        input_ids.data_ptr(),
        positions.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        groups,
        len(tables),
    )
    return StepInputs(input_ids, positions, query_start_loc, seq_lens, tuple(group_inputs))
