"""Decoders that attend to what an encoder read, in one call: against the reference, and row by row the same bits."""

from __future__ import annotations

import pytest
import torch
from kernels_cpu_steps import Layout
from test_kernels_cpu_decoder import TOLERANCE, _widened, angles
from test_kernels_cpu_mixers import HIDDEN, Maker
from torch import Tensor

from quire_kernels_cpu.decoder import decoder_stack
from quire_ops import AttentionWeights, CrossAttentionWeights, DecoderLayerWeights, DecoderStack, ops

HEADS = 2
DIMS = [32, 20]
"""Of a head: a whole tile, and one with a rest."""


def make_stack(dtype: torch.dtype, form: str, dim: int) -> DecoderStack:
    make, layers = Maker(dtype, form), []
    for index in range(2):
        own = AttentionWeights(
            q=make.linear(HEADS * dim, bias=True),
            k=make.linear(HEADS * dim),
            v=make.linear(HEADS * dim, bias=True),
            o=make.linear(HIDDEN, HEADS * dim),
            head_dim=dim,
            scale=dim**-0.5,
            rotation=None,
        )
        cross = CrossAttentionWeights(
            q=make.linear(HEADS * dim, bias=True),
            o=make.linear(HIDDEN, HEADS * dim, bias=True),
            num_kv_heads=HEADS,
            head_dim=dim,
            scale=dim**-0.5,
        )
        norm = make.norm("layer")
        layers.append(DecoderLayerWeights(input_norm=norm, mixer=own, cache=index, feed_forward=None))
        layers.append(
            DecoderLayerWeights(
                input_norm=norm,
                mixer=cross,
                cache=2 + index,
                feed_forward_norm=make.norm("layer"),
                feed_forward=make.mlp("gelu_erf"),
            )
        )
    return DecoderStack(
        layers=tuple(layers),
        final_norm=make.norm("layer"),
        hidden_size=HIDDEN,
        dtype=dtype,
        rotary_dim=0,
        rounds_steps=True,
    )


def crossing(encoder: Layout, query_lens: list[int]) -> Layout:
    """The layout of cross attention: each token is a sequence, of its row's blocks."""
    rows = torch.arange(len(query_lens)).repeat_interleave(torch.tensor(query_lens))
    lens = [encoder.kv_lens[row] for row in rows]
    return Layout(encoder.block_size, [1] * len(rows), lens, encoder.block_table[rows].contiguous())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["plain", "int4"])
@pytest.mark.parametrize("dim", DIMS)
def test_a_step_equals_the_reference(dim: int, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    stack, queries = make_stack(dtype, form, dim), [5, 1, 20, 1]
    own = Layout(16, queries, [5, 30, 70, 1])
    encoder = Layout(8, [1] * 4, [1100, 3, 64, 17])
    layouts, groups = [own, crossing(encoder, queries)], (0, 0, 1, 1)
    caches = tuple((own, encoder)[group].cache(HEADS, dim, dtype) for group in groups)
    wide = tuple(cache.double() for cache in caches)
    x, turns = torch.randn(sum(queries), HIDDEN).to(dtype), [angles(own, 0, dtype)]
    wide_turns = [(cos.double(), sin.double()) for cos, sin in turns]
    expected = ops.decoder_stack(_widened(stack))(x.double(), wide_turns, layouts, groups, wide)
    got = decoder_stack(stack)(x, turns, layouts, groups, caches)
    assert (got.double() - expected).abs().max() <= 2 * TOLERANCE[dtype] * expected.abs().max()
    assert all(torch.equal(a.nan_to_num().double(), b.nan_to_num()) for a, b in zip(caches[2:], wide[2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    stack, lengths = make_stack(dtype, "plain", 32), [23, 1, 6]
    run, groups = decoder_stack(stack), (0, 0, 1, 1)
    own, encoder = Layout(8, lengths, lengths), Layout(16, [1] * 3, [1400, 5, 40])
    read = [encoder.cache(HEADS, 32, dtype) for _ in range(2)]

    def fresh() -> tuple[Tensor, ...]:
        return (*(own.cache(HEADS, 32, dtype).fill_(float("nan")) for _ in range(2)), *read)

    x = torch.randn(sum(lengths), HIDDEN).to(dtype)
    together = run(x, [angles(own, 0, dtype)], [own, crossing(encoder, lengths)], groups, fresh())
    caches = fresh()
    for row, length in enumerate(lengths):
        begin, done = int(own.query_start_loc[row]), 0
        for chunk in (3, 1, 19) if length > 6 else (length,):
            part = slice(begin + done, begin + done + chunk)
            alone = Layout(8, [chunk], [done + chunk], own.block_table[row : row + 1].contiguous())
            lens = [encoder.kv_lens[row]] * chunk
            table = encoder.block_table[[row] * chunk].contiguous()
            layouts = [alone, Layout(16, [1] * chunk, lens, table)]
            assert torch.equal(run(x[part], [angles(alone, 0, dtype)], layouts, groups, caches), together[part])
            done += chunk
