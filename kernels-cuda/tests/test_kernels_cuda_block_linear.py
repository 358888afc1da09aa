"""Weights in planes against the reference of blocks: each format, one row, few rows with splits, many, embeddings."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.triton import block_linear as blocks
from quire_kernels_cuda.triton.matmul import MatmulTile
from quire_ops import LinearWeights
from quire_ops import ops as ref
from quire_ops.block_formats import BLOCK_FORMATS, block_header, format_in_planes, in_planes
from quire_testkit.random_blocks import random_blocks

FORMATS = [name for name, layout in BLOCK_FORMATS.items() if layout.planes]
each_format = pytest.mark.parametrize("form", FORMATS)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)


def sorted_weight(form, weight, header):
    """The same in planes, and its header."""
    constants = header[1:] if form in ("NVFP4", "TABLE4") else None
    return here(in_planes(weight, form)), here(block_header(form, constants, planes=True))


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(form, dtype):
    inputs = 768 if BLOCK_FORMATS[form].inputs == 256 else 320  # no whole turns
    for seed, (rows, tile) in enumerate(
        [(1, MatmulTile(1, 16, 0, 2, 1, 1)), (3, MatmulTile(16, 16, 0, 2, 1, 1)), (1, None)]
    ):
        weight, header = random_blocks(form, 21, inputs, seed)
        x, bias = random_tensor(rows, inputs + 16, dtype=dtype)[:, :inputs], random_tensor(21, dtype=dtype)
        planes, of_planes = sorted_weight(form, weight, header)
        if tile is None:
            got = blocks.block_linear(here(x), planes, of_planes, None, wide=True)
            check(got, ref.block_linear(x, weight, header, None, wide=True), dtype)
        else:
            got = blocks.run_block_matmul(here(x), planes, of_planes, here(bias), out_dtype=dtype, tile=tile)
            check(got, ref.block_linear(x, weight, header, bias), dtype)


def test_many_rows():
    x = random_tensor(35, 256)
    weight, header = random_blocks("Q4_K", 7, 256)
    check(
        blocks.block_linear(here(x), *sorted_weight("Q4_K", weight, header), None),
        ref.block_linear(x, weight, header, None),
    )
    assert blocks.block_linear(here(x[:0]), *sorted_weight("Q4_K", weight, header), None).shape == (0, 7)


@each_format
def test_rows_of_an_embedding_are_exact(form):
    size = 512 if BLOCK_FORMATS[form].inputs == 256 else 320
    weight, header = random_blocks(form, 9, size)
    ids = torch.tensor([8, 0, 3])
    planes, of_planes = sorted_weight(form, weight, header)
    got = blocks.quantized_embedding(here(ids), LinearWeights(planes, scale=of_planes), size, torch.float32)
    wanted = ref.quantized_embedding(ids, LinearWeights(weight, scale=header), size, torch.float32)
    assert (got.cpu() - wanted).abs().max() <= 2e-7 * wanted.abs().max()
    from_planes = LinearWeights(planes.cpu(), scale=of_planes.cpu())
    assert torch.equal(ref.quantized_embedding(ids, from_planes, size, torch.float32), wanted)


def test_an_embedding_of_another_form_goes_to_torch():
    table, scale = torch.randint(-127, 128, (9, 40), dtype=torch.int8), torch.rand(9)
    weights, ids = LinearWeights(table, scale=scale), torch.tensor([8, 0, 3])
    got = blocks.quantized_embedding(here(ids), here(weights), 40, torch.float32)
    assert torch.equal(got.cpu(), ref.quantized_embedding(ids, weights, 40, torch.float32))


def test_weights_in_blocks_are_refused():
    weight, header = random_blocks("Q4_K", 7, 256)
    assert format_in_planes(header) is None
    with pytest.raises(ConfigError, match="in planes"):
        blocks.block_linear(here(random_tensor(1, 256)), here(weight), here(header), None)
