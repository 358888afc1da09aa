"""Rows of tables of embeddings in every form of a quantized weight, against the dequantized table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_ops import LinearWeights, OpBackend, OpRequest, op_table, ops
from quire_ops.block_formats import BLOCK_FORMATS
from quire_ops.grouped import block_groups, pack_int4
from quire_testkit.random_blocks import random_blocks

ROWS, SIZE = 37, 512
IDS = [36, 0, 35, 31, 32, 5, 5, 16, 15] * 3
"""Rows of whole blocks of 16, and of the last one, which is not whole."""


def grouped(elements: Tensor, size: int, scale: torch.dtype, *, zero: bool) -> LinearWeights:
    groups = -(-SIZE // size)
    scales = block_groups(torch.rand(ROWS, groups).add(0.1).to(scale))
    zeros = block_groups(torch.randint(-8, 8, (ROWS, groups)).short()) if zero else None
    return LinearWeights(elements, scale=scales, zero=zeros)


def tables(dtype: torch.dtype) -> dict[str, LinearWeights]:
    torch.manual_seed(0)
    int8 = torch.randint(-128, 128, (ROWS, SIZE), dtype=torch.int8)
    int4 = pack_int4(torch.randint(-8, 8, (ROWS, SIZE), dtype=torch.int8))
    fp8 = torch.randn(ROWS, SIZE).to(torch.float8_e4m3fn)
    blocks = {form: random_blocks(form, ROWS, SIZE, seed=1) for form in BLOCK_FORMATS}
    return {
        "plain": LinearWeights(torch.randn(ROWS, SIZE).to(dtype)),
        "int8": LinearWeights(int8, scale=torch.rand(ROWS).to(dtype)),
        "int8 in groups": grouped(int8, 64, torch.float32, zero=False),
        "int4": grouped(int4, 128, dtype, zero=True),
        "int4 in groups of 32": grouped(int4, 32, torch.float32, zero=False),
        "fp8": grouped(fp8, 32, dtype, zero=False),
        **{form: LinearWeights(weight, scale=header) for form, (weight, header) in blocks.items()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", op_table().backends(ops.quantized_embedding), ids=lambda each: each.name)
def test_rows_have_the_bits_of_the_dequantized_table(backend: OpBackend, dtype: torch.dtype) -> None:
    if backend.refusal(OpRequest(dtype=dtype)) is not None:
        pytest.skip(f"{backend.name} does not serve here")
    ids = torch.tensor(IDS)
    for name, table in tables(dtype).items():
        wanted = ops.quantized_embedding(ids, table, SIZE, dtype)
        got = backend.function(ids, table, SIZE, dtype)
        assert got.dtype == dtype
        assert torch.equal(got, wanted), name
        assert len(torch.unique(wanted, dim=0)) == len(set(IDS))
    assert backend.function(ids[:0], table, SIZE, dtype).shape == (0, SIZE)


@pytest.mark.parametrize("backend", op_table().backends(ops.quantized_embedding), ids=lambda each: each.name)
def test_rows_that_are_not_there_are_an_error(backend: OpBackend) -> None:
    if backend.refusal(OpRequest(dtype=torch.float32)) is not None:
        pytest.skip(f"{backend.name} does not serve here")
    for table in tables(torch.float32).values():
        for row in (ROWS, -ROWS - 1):
            with pytest.raises(IndexError):
                backend.function(torch.tensor([0, row]), table, SIZE, torch.float32)
