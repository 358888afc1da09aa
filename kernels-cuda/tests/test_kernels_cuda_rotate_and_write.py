"""Norms of heads, rotation and writing in one kernel: what the ops do apart, and nothing beside the slots."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DEVICE, check, here, poison, poisoned_cache, random_tensor

from quire_kernels_cuda.triton import rotary
from quire_ops import ops as ref

SLOTS = torch.tensor([9, 4])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 8), (5, 1, 96)])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "normed"),
    [
        (torch.float32, None, False),
        (torch.bfloat16, None, True),
        (torch.bfloat16, torch.float8_e4m3fn, True),
        (torch.bfloat16, torch.float8_e5m2, False),
        (torch.float16, torch.int8, True),
    ],
    ids=str,
)
def test_equals_the_ops_in_turn(monkeypatch, dtype, cache_dtype, heads, kv_heads, head_dim, normed):
    torch.manual_seed(heads)
    fused = random_tensor(2, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    query, key, value = fused.view(2, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)  # rows apart
    angle = torch.rand(2, 1, head_dim // 2) * 6
    cos, sin = (torch.cat(parts, -1).to(dtype) for parts in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    norms = {"query_norm": random_tensor(head_dim), "key_norm": random_tensor(head_dim), "eps": 1e-3} if normed else {}
    is_fp8 = cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    scale = torch.rand(2, kv_heads) + 0.5 if is_fp8 and normed else None
    kept = cache_dtype or dtype
    got, wanted = (poisoned_cache(3, kv_heads, head_dim, kept, device) for device in (DEVICE, "cpu"))
    given = [query, key, value, cos, sin]
    poison(monkeypatch)
    on_device = {name: here(each) for name, each in norms.items()}
    out = rotary.rope_and_write_kv(*map(here, given), got, here(SLOTS), kv_scale=here(scale), **on_device)
    check(out, ref.rope_and_write_kv(*given, wanted.clone(), SLOTS, kv_scale=scale, **norms), dtype)
    # Keys are rotated as queries are: their bits in the cache are those of rotated queries, written by the reference.
    keys = rotary.rope_and_write_kv(
        here(key), *map(here, given[1:]), got.clone(), here(SLOTS), kv_scale=here(scale),
        **on_device | ({"query_norm": on_device["key_norm"]} if normed else {}),
    )  # fmt: skip
    ref.write_kv_cache(keys.cpu(), value, wanted, SLOTS, scale)
    assert torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))


def test_no_tokens():
    empty = here(torch.empty(0, 2, 8))
    slots = here(torch.empty(0, dtype=torch.int64))
    cache = poisoned_cache(3, 2, 8, torch.float32, DEVICE)
    assert rotary.rope_and_write_kv(empty, empty, empty, empty, empty, cache, slots).shape == (0, 2, 8)
