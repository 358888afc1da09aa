"""Norms of heads, rotation and writing the cache in one call, against the reference and against the ops one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_kernels_cpu.ops import write_kv_cache
from quire_kernels_cpu.rope_and_cache import rope_and_write_kv
from quire_ops import kv_cache_shape, ops
from quire_ops.kv_format import CACHE_TORCH_DTYPES

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
SHAPES = [(1, 4, 2, 32), (5, 3, 1, 20), (70, 8, 8, 64), (17, 6, 2, 256), (3, 1, 1, 8)]
"""Tokens, query heads, key-value heads, head dimension."""
BLOCK_SIZE = 4


class Case:
    """Random inputs: heads of a token side by side, tokens apart; slots at random."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, norms: torch.dtype | None) -> None:
        torch.manual_seed(sum(shape))
        tokens, heads, kv_heads, dim = self.shape = shape
        joined = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
        parts = joined.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        self.query, self.key, self.value = (part.unflatten(1, (-1, dim)) for part in parts)
        turns = torch.rand(tokens, 1, dim // 2) * 6.28
        self.cos = torch.cat([turns.cos()] * 2, -1).to(dtype)
        self.sin = torch.cat([-turns.sin(), turns.sin()], -1).to(dtype)
        self.num_blocks = tokens // BLOCK_SIZE + 3
        self.slots = torch.randperm(self.num_blocks * BLOCK_SIZE)[:tokens]
        self.norms = {}
        if norms is not None:
            self.norms = {name: torch.rand(dim).add(0.5).to(norms) for name in ("query_norm", "key_norm")} | {
                "eps": 1e-6
            }

    def cache(self, name: str, dtype: torch.dtype) -> Tensor:
        """Of a format's name, or of the network's type; poisoned."""
        _, _, kv_heads, dim = self.shape
        row_size = {"int8": dim + 4, "int4": dim // 2 + 4}.get(name, dim)
        shape = kv_cache_shape(self.num_blocks, BLOCK_SIZE, kv_heads, row_size)
        if name == "auto":
            return torch.full(shape, torch.nan, dtype=dtype)
        cache = torch.empty(shape, dtype=CACHE_TORCH_DTYPES[name])
        cache.view(torch.uint8).fill_(0x55)
        return cache

    def run(self, cache: Tensor, kv_scale: Tensor | None = None) -> Tensor:
        return rope_and_write_kv(
            self.query, self.key, self.value, self.cos, self.sin, cache, self.slots, kv_scale=kv_scale, **self.norms
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norms", ["none", "own", "wide"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int, int, int], norms: str, dtype: torch.dtype) -> None:
    case = Case(shape, dtype, {"none": None, "own": dtype, "wide": torch.float32}[norms])
    cache = case.cache("auto", dtype)
    wide = cache.double()
    inputs = [each.double() for each in (case.query, case.key, case.value, case.cos, case.sin)]
    wide_norms = {name: norm.double() if isinstance(norm, Tensor) else norm for name, norm in case.norms.items()}
    expected = ops.rope_and_write_kv(*inputs, wide, case.slots, **wide_norms)
    got = case.run(cache)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    written = wide.isfinite()
    assert torch.equal(cache.isfinite(), written)
    assert (cache.double() - wide)[written].abs().max() <= TOLERANCE[dtype] * wide[written].abs().max()


@pytest.mark.parametrize("cache_name", ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_cache_gets_what_the_op_writes(dtype: torch.dtype, cache_name: str) -> None:
    case = Case((19, 4, 2, 64), dtype, dtype)
    kv_scale = torch.tensor([[0.5, 2.0], [1.5, 0.25]]) if cache_name.startswith("fp8") else None
    cache, again = case.cache(cache_name, dtype), case.cache(cache_name, dtype)
    case.run(cache, kv_scale)
    keys = rope_and_write_kv(
        case.key, case.key, case.value, case.cos, case.sin, case.cache(cache_name, dtype), case.slots,
        kv_scale=kv_scale, query_norm=case.norms["key_norm"], key_norm=case.norms["key_norm"], eps=1e-6,
    )  # fmt: skip
    write_kv_cache(keys, case.value, again, case.slots, kv_scale)
    assert torch.equal(cache.view(torch.uint8), again.view(torch.uint8))


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    case = Case((70, 8, 2, 64), torch.bfloat16, torch.float32)
    together = case.run(case.cache("auto", torch.bfloat16))
    for token in (0, 33, 69):
        alone = Case((70, 8, 2, 64), torch.bfloat16, torch.float32)
        for name in ("query", "key", "value", "cos", "sin", "slots"):
            setattr(alone, name, getattr(alone, name)[token : token + 1])
        assert torch.equal(alone.run(alone.cache("auto", torch.bfloat16))[0], together[token])


def test_a_cache_of_another_type_goes_to_torch() -> None:
    case = Case((6, 4, 2, 32), torch.float32, torch.float32)
    cache, expected = case.cache("auto", torch.bfloat16), case.cache("auto", torch.float32)
    got = case.run(cache)
    torch.testing.assert_close(got, case.run(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, expected.to(torch.bfloat16), rtol=1e-2, atol=1e-2, equal_nan=True)
