"""The most likely token of a row of logits, or one drawn from those that min_p, top_k and top_p keep. No sort.

How it is drawn is told in `sampling_kernels.py`. What is launched depends on the numbers of rows and of tokens only, so
that graphs hold for every request; rows that are not drawn, or not filtered, leave the kernels early.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.triton.sampling_kernels import BINS, bracket_kernel, draw_kernel, gather_kernel, look_kernel
from quire_ops import SampleTable, implements, ops

__all__ = ["calls", "sample", "sample_masked"]


@implements(ops.sample)
def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    return _sample_rows(logits, rows, positions, table, None, None)


@implements(ops.sample_masked)
def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    """Op `sample_masked`: -inf is written over the logits of tokens that are left out."""
    return _sample_rows(logits, rows, positions, table, mask_of, bitmask)


def _sample_rows(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: SampleTable,
    mask_of: Tensor | None,
    bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    max_logits = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return ids, max_logits
    block = min(4096, max(64, triton.next_power_of_2(vocab_size)))
    num_pieces = triton.cdiv(vocab_size, block)
    padded = max(16, triton.next_power_of_2(num_pieces))
    largest = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    best, num_nan, first_bin = (torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device) for _ in range(3))
    far_weight = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    histograms = torch.empty((num_rows, num_pieces, BINS), dtype=torch.int32, device=device)
    brackets = torch.empty((num_rows, 2, 2), dtype=torch.float32, device=device)
    values = torch.empty((num_rows, num_pieces, block), dtype=torch.float32, device=device)
    sums = torch.empty((num_rows, num_pieces, 2), dtype=torch.int64, device=device)
    counts = torch.empty((num_rows, num_pieces, 3), dtype=torch.int32, device=device)
    stride = logits.stride(0)
    look_kernel[(num_pieces, num_rows)](
        logits, rows, table.do_sample, table.inv_temperature, table.top_k, table.top_p,
        rows if mask_of is None else mask_of, rows if bitmask is None else bitmask, largest, best, num_nan, first_bin,
        histograms, far_weight, vocab_size, stride, 0 if bitmask is None else bitmask.stride(0), num_pieces,
        MASKED=bitmask is not None, BLOCK=block, BINS=BINS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    bracket_kernel[(num_rows,)](
        rows, table.do_sample, table.inv_temperature, table.top_k, table.top_p, table.min_log2, largest, best, num_nan,
        first_bin, histograms, far_weight, ids, max_logits, brackets, vocab_size, num_pieces,
        PIECES=padded, BINS=BINS, WIDTH=2 * BINS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    gather_kernel[(num_pieces, num_rows)](
        logits, rows, table.do_sample, table.inv_temperature, table.top_k, table.min_log2, max_logits, brackets,
        values, sums, counts, vocab_size, stride, num_pieces, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, rows, positions, table.do_sample, table.seeds, table.num_prompt_tokens, table.inv_temperature,
        table.top_k, table.top_p, table.min_log2, max_logits, brackets, values, sums, counts, ids, vocab_size, stride,
        num_pieces, PIECES=padded, BLOCK=block, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return ids, max_logits


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Sampling for each row, and one with masks."""
    logits = torch.empty(16, shape.vocab_size, dtype=torch.float32, device="meta")
    rows = torch.empty(16, dtype=torch.int64, device="meta")
    table = SampleTable.greedy(256, shape.vocab_size, "meta")
    yield f"v{shape.vocab_size}", lambda: sample(logits, rows, rows, table)
    masks = torch.empty(8, -(-shape.vocab_size // 32), dtype=torch.int32, device="meta")
    yield f"v{shape.vocab_size} masked", lambda: sample_masked(logits, rows, rows, table, rows, masks)
