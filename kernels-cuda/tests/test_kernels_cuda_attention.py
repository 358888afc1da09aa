"""Paged attention in Triton against the reference: random steps; everything that must not be read is NaN."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernels_cuda_attention_cases import DEVICE, TOLERANCE, cache_of, check, on_device
from ops_layouts import random_layout

from quire_kernels_cuda.platform import LaunchConfig, Platform, choosing
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import attention
from quire_kernels_cuda.triton.attention import paged_attention
from quire_ops import ops as ref

TINY = {
    "decode_attention": LaunchConfig(blocks={"BLOCK_N": 16}, num_warps=4, num_stages=2),
    "prefill_attention": LaunchConfig(blocks={"BLOCK_M": 16, "BLOCK_N": 16}, num_warps=4, num_stages=2),
}
"""Pieces so small that a few dozen tokens take several."""
DECODES = [(1, 5), (1, 70), (1, 1), (1, 33), (1, 70)]
MIXED = [(1, 17), (12, 25), (1, 70), (20, 20), (3, 40), (9, 61), (1, 2)]

FEATURES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "window of one": {"sliding_window": 1, "soft_cap": 2.0},
    "window of more than a piece": {"sliding_window": 37, "sinks": True},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": True},
    "slopes": {"alibi": True},
    "everything": {"sliding_window": 19, "soft_cap": 4.0, "sinks": True, "alibi": True},
}


def in_small_pieces(*args: Any, **options: Any) -> torch.Tensor:
    with choosing(lambda problem, _: TINY[problem.kernel]):
        return paged_attention(*args, **options)


def tensors(features: dict[str, Any], num_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    given = dict(features)
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-3.0, 3.0, num_heads).to(dtype)
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.logspace(-1, -3, num_heads)
    return given


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("features", FEATURES)
def test_features(features: str, lens: list[tuple[int, int]]) -> None:
    check(in_small_pieces, lens, heads=(6, 2), **tensors(FEATURES[features], 6, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", ["plain", "everything"])
def test_narrow_dtypes(features: str, dtype: torch.dtype) -> None:
    options = tensors(FEATURES[features], 4, dtype)
    check(in_small_pieces, MIXED, dtype=dtype, heads=(4, 1), **options)


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [16, 24], ids=["whole", "padded"])
def test_caches_of_fewer_bits(cache_dtype: str, head_dim: int) -> None:
    kv_scale = torch.tensor([[0.02, 0.5], [0.03, 0.01]]) if cache_dtype.startswith("fp8") else None
    for dtype in (torch.float32, torch.bfloat16):
        check(in_small_pieces, [(1, 40), (12, 20), (1, 3)], dtype=dtype, head_dim=head_dim,
              cache_dtype=cache_dtype, kv_scale=kv_scale, soft_cap=5.0)  # fmt: skip


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="this GPU converts 8-bit floats itself")
def test_8_bit_floats_where_the_gpu_has_none(cache_dtype: str) -> None:
    old = Platform(targets=NVIDIA_TARGETS, target_of=lambda _: NVIDIA_TARGETS["sm_80"])
    check(partial(paged_attention, platform=old), [(1, 40), (12, 20)], cache_dtype=cache_dtype, dtype=torch.bfloat16,
          kv_scale=torch.tensor([[0.02, 0.5], [0.03, 0.01]]))  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((5, 1), 80, 4), ((16, 16), 8, 1), ((32, 1), 64, 32), ((8, 2), 128, 256), ((3, 3), 256, 16)],
    ids=str,
)
def test_shapes(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    lens = [(1, 75), (10, 15), (2, 2)]
    check(paged_attention, lens, heads=heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)


def test_configurations_that_are_launched_by_default() -> None:
    check(paged_attention, [(1, 300), (1, 1), (140, 150)], heads=(2, 2))


@pytest.mark.parametrize("features", ["plain", "everything"])
def test_tokens_in_trees(features: str) -> None:
    """A tree in one tile, a later part of one in two tiles, a decode and a chunk of a prompt beside them."""
    check(paged_attention, [(6, 45), (1, 30), (11, 40), (3, 9)], heads=(4, 2),
          roots={0: 37, 2: 25}, **tensors(FEATURES[features], 4, torch.float32))  # fmt: skip


@pytest.mark.parametrize(("num_splits", "vendor"), [(2, "cuda"), (8, "cuda"), (8, "hip")])
def test_splits(num_splits: int, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than there are keys to share, too; their results are joined by the last one, or by a kernel."""
    monkeypatch.setattr(attention, "num_splits", lambda *_: num_splits)
    target = replace(NVIDIA_TARGETS["sm_90"], vendor=vendor)
    platform = Platform(targets={}, target_of=lambda device: target)
    for window in (None, 20):
        check(partial(in_small_pieces, platform=platform), [(1, 90), (1, 1), (5, 70), (1, 16)], heads=(4, 1),
              sliding_window=window, sinks=torch.linspace(-1, 1, 4))  # fmt: skip


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU says in which order programs run")
def test_splits_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever ends last, results have the same bits; counts are zero again for the next layer. Rows of padding have
    no keys."""
    from triton.runtime.interpreter import interpreter_builder

    def launch() -> torch.Tensor:
        return in_small_pieces(query, cache, layout, scale=0.3)

    monkeypatch.setattr(attention, "num_splits", lambda *_: 4)
    torch.manual_seed(0)
    layout, num_blocks = random_layout(random.Random(0), [(1, 90), (1, 3), (2, 40)], 16, shuffle=True)
    cache = cache_of(layout, num_blocks, (2, 16), "float32", None)
    query = torch.randn(4, 6, 16)
    first, again = launch(), launch()
    place = interpreter_builder.set_grid_idx
    others: list[int] = []

    def backwards(x: int, y: int, z: int) -> None:
        others.append(interpreter_builder.grid_dim[2])
        place(x, y, others[-1] - 1 - z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    assert torch.equal(first, launch())
    assert torch.equal(first, again)
    assert set(others) == {4}
    counts = [each for key, each in layout.derived.items() if key == ("triton arrived", 2)]
    assert [each.tolist() for each in counts] == [[[0, 0]] * 3]


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    lens = []
    for _ in range(rng.randint(1, 6)):
        kv_len = rng.randint(1, 50)
        lens.append((rng.choice([1, 1, min(kv_len, 8), min(kv_len, 9), kv_len]), kv_len))
    num_kv_heads = rng.choice([1, 2, 3])
    check(
        rng.choice([in_small_pieces, paged_attention]),
        lens,
        dtype=rng.choice(list(TOLERANCE)),
        heads=(num_kv_heads * rng.choice([1, 2, 7]), num_kv_heads),
        block_size=rng.choice([1, 4, 16, 32]),
        sliding_window=rng.choice([None, None, rng.randint(1, 60)]),
        soft_cap=rng.choice([None, 2.0]),
        seed=seed,
    )


@pytest.mark.parametrize("window", [None, 21])
def test_lengths_are_read_from_the_device(window: int | None) -> None:
    """As a captured graph is used: the host knows bounds, rows of padding have no tokens, lengths grow."""
    torch.manual_seed(0)
    lens = [30, 1, 47, 16]
    layout, num_blocks = random_layout(random.Random(0), [(1, 64)] * 4, 16, shuffle=True)
    cache = cache_of(layout, num_blocks, (2, 16), "float32", None)
    query = torch.randn(5, 4, 16)
    static = on_device(layout)
    static.query_start_loc = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32, device=DEVICE)
    static.block_table = torch.cat((static.block_table, torch.zeros_like(static.block_table[:1])))
    static.seq_lens = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    static.query_lens, static.kv_lens = [1] * 5, [64] * 5
    device_query, device_cache = query.to(DEVICE), cache.to(DEVICE)

    def attend() -> torch.Tensor:
        return in_small_pieces(device_query, device_cache, static, scale=0.25, sliding_window=window)

    attend()
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
    for grown in (0, 1, 17):
        layout.kv_lens = [kv_len + grown for kv_len in lens]
        static.seq_lens.copy_(torch.tensor([*layout.kv_lens, 0], dtype=torch.int32))
        if DEVICE.type == "cuda":
            graph.replay()
        got = (captured if DEVICE.type == "cuda" else attend()).cpu()
        wanted = ref.paged_attention(query[:4], cache, layout, scale=0.25, sliding_window=window)
        assert (got[:4] - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (got[4] == 0).all()
