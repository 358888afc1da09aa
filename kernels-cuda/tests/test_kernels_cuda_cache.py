"""What is written into the paged cache, to the bit: every format, strange numbers, and nothing beside the slots."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DEVICE, DTYPES, here, poisoned_cache, random_tensor

from quire_kernels_cuda.triton import rotary
from quire_ops import ops as ref
from quire_ops.kv_format import rows_of

FORMATS = ("compute", torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
SLOTS = torch.tensor([9, 4, 15, 6, 5, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (5, 96), (12, 128)])
def test_the_bits_are_those_of_the_reference(dtype, cache_dtype, heads, head_dim):
    torch.manual_seed(heads)
    cache_dtype = dtype if cache_dtype == "compute" else cache_dtype
    key, value = random_tensor(6, heads + 1, head_dim, dtype=dtype), random_tensor(6, heads, head_dim, dtype=dtype)
    value *= torch.logspace(-9, 6, 6)[:, None, None].to(dtype)  # underflow to overflow, subnormals between
    key[0], value[1, 0], key[2, 0, 1] = 0.0, 3e-39, -0.0
    key[3, 0, 0], value[4, 0, 1] = float("nan"), float("inf")
    key[5, 0, :4] = torch.tensor([17.0, 19.0, -17.0, -19.0]).to(dtype)  # halves between numbers of fp8
    key = key[:, :heads]  # rows apart, as behind a fused projection
    scale = torch.rand(2, heads) + 0.5 if cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else None
    wanted, got = (poisoned_cache(4, heads, head_dim, cache_dtype, device) for device in ("cpu", DEVICE))
    ref.write_kv_cache(key, value, wanted, SLOTS, scale)
    rotary.write_kv_cache(here(key), here(value), got, here(SLOTS), here(scale))
    for mine, theirs in zip(contents(got.cpu()), contents(wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def contents(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, and floating-point numbers: of all NaN, one is as good as another."""
    codes, *scales = rows_of(cache)
    return (codes, scales[0].contiguous().view(torch.float32)) if scales else (torch.empty(0), codes.float())


def test_no_tokens():
    key, cache = torch.empty(0, 2, 8), poisoned_cache(4, 2, 8, torch.float32, DEVICE)
    rotary.write_kv_cache(here(key), here(key), here(cache), here(torch.empty(0, dtype=torch.int64)), None)
