"""Whole decode steps in one call against the reference made of ops, and what must not be computed that way."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from kernels_cpu_steps import make_sample_table
from test_kernels_cpu_decoder import KV_HEADS, RULES, _widened, make_stack
from torch import Tensor

from quire_kernels_cpu.decode_step import decode_step
from quire_ops import DecodeNetwork, DecodeRows, LinearWeights, RoutingRule, RowTable, ops
from quire_ops.block_formats import decode_blocks
from quire_testkit.random_blocks import random_blocks

VOCAB, ROW_LEN, NUM_ROWS, HEAD_DIM = 300, 90, 9, 32
BLOCK_SIZE, WINDOW = 4, 20
GROUP_OF_LAYER = (0, 1, 0)


def rotations(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.arange(length + 3)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def make_network(
    dtype: torch.dtype, *, int8_head: bool = False, experts: str | None = None, rule: RoutingRule | None = None
) -> DecodeNetwork:
    head = LinearWeights(torch.randn(VOCAB, 64).to(dtype))
    if int8_head:
        scale = (torch.rand(VOCAB) * 0.01 + 0.001).to(dtype)
        head = LinearWeights(torch.randint(-127, 128, (VOCAB, 64), dtype=torch.int8), None, scale)
    return DecodeNetwork(
        embedding=LinearWeights(torch.randn(VOCAB, 64).to(dtype)),
        stack=make_stack(dtype, windows=(None, WINDOW, None), experts=experts, rule=rule),
        head=head,
        rotations=(lambda length: rotations(length, dtype),),
    )


def widened(network: DecodeNetwork) -> DecodeNetwork:
    return dataclasses.replace(
        network,
        embedding=LinearWeights(network.embedding.weight.double()),
        stack=_widened(network.stack),
        head=LinearWeights(
            *(part if part is None or part.dtype == torch.int8 else part.double() for part in network.head[:4])
        ),
        rotations=(lambda length: tuple(part.double() for part in network.rotations[0](length)),),  # type: ignore[arg-type,return-value]
    )


def make_rows(dtype: torch.dtype, rng: random.Random) -> DecodeRows:
    """Rows of random lengths, whose earlier keys and values are random, too; slots of nobody hold NaN."""
    width = -(-ROW_LEN // BLOCK_SIZE)
    lengths = [rng.randint(1, ROW_LEN - 20) for _ in range(NUM_ROWS)]
    free = torch.randperm(2 * NUM_ROWS * width).add(1).to(torch.int32).view(2, NUM_ROWS, width)
    shape = (2 * NUM_ROWS * width + 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = []
    for group in GROUP_OF_LAYER:
        cache = torch.full(shape, torch.nan, dtype=dtype)
        for row, length in enumerate(lengths):
            for position in range(length):
                cache[free[group, row, position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = torch.randn(
                    2, KV_HEADS, HEAD_DIM
                ).to(dtype)
        caches.append(cache)
    return DecodeRows(
        token_ids=torch.randint(0, VOCAB, (NUM_ROWS, ROW_LEN), dtype=torch.int32),
        num_tokens=np.array([length + 1 for length in lengths]),
        tables=(RowTable(free[0], BLOCK_SIZE), RowTable(free[1], BLOCK_SIZE, WINDOW)),
        num_blocks=(np.full(NUM_ROWS, width), np.full(NUM_ROWS, width)),
        group_of_layer=GROUP_OF_LAYER,
        kv_caches=tuple(caches),
        lora_slots=np.full(NUM_ROWS, -1, dtype=np.int32),
        position_deltas=np.array([-(length // 2) for length in lengths]),
        sample_table=make_sample_table(NUM_ROWS, VOCAB, rng.getrandbits(32)),
    )


def copied(rows: DecodeRows, dtype: torch.dtype) -> DecodeRows:
    return DecodeRows(
        token_ids=rows.token_ids.clone(),
        num_tokens=rows.num_tokens.copy(),
        tables=rows.tables,
        num_blocks=rows.num_blocks,
        group_of_layer=rows.group_of_layer,
        kv_caches=tuple(cache.to(dtype, copy=True) for cache in rows.kv_caches),
        lora_slots=rows.lora_slots.copy(),
        position_deltas=rows.position_deltas.copy(),
        sample_table=rows.sample_table,
    )


def test_embedding_and_head_in_blocks_have_the_bits_of_decoded_ones() -> None:
    torch.manual_seed(0)
    weight, header = random_blocks("Q4_1", VOCAB, 64)
    blocks, decoded = LinearWeights(weight, scale=header), LinearWeights(decode_blocks(weight, header))
    network, rows = make_network(torch.float32), make_rows(torch.float32, random.Random(0))
    which = list(range(NUM_ROWS))
    starts = [int(rows.num_tokens[row]) - 1 for row in which]
    found = [
        decode_step(dataclasses.replace(network, embedding=table, head=table), copied(rows, torch.float32)).logits(
            which, starts
        )
        for table in (blocks, decoded)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(*found)
    assert found[0].abs().max() > 0


@pytest.mark.parametrize("kind", ["dense", "experts", "factors"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_equal_the_reference_token_by_token(seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    network = make_network(torch.float32, experts="plain" if kind == "experts" else None, rule=RULES[0])
    if kind == "factors":
        cap = 5.0 if seed % 2 else None
        network = dataclasses.replace(network, embedding_factor=1.7, logits_factor=0.4, logits_soft_cap=cap)
    rows = make_rows(torch.float32, rng)
    expected = copied(rows, torch.float64)
    run, reference = decode_step(network, rows), ops.decode_step(widened(network), expected)
    for _ in range(12):
        which = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
        starts = [int(rows.num_tokens[row]) - 1 for row in which]
        logits, wide_logits = run.logits(which, starts), reference.logits(which, starts)
        assert logits is not None
        assert wide_logits is not None
        torch.testing.assert_close(logits, wide_logits.float(), rtol=1e-4, atol=1e-4)
        tokens = run(which, starts)
        assert tokens is not None
        assert tokens == reference(which, starts)
        assert tokens == [int(rows.token_ids[row, start + 1]) for row, start in zip(which, starts, strict=True)]
    assert torch.equal(rows.token_ids, expected.token_ids)
    assert np.array_equal(rows.num_tokens, expected.num_tokens)
    for cache, wide in zip(rows.kv_caches, expected.kv_caches, strict=True):
        assert torch.equal(cache.isfinite(), wide.isfinite())
        assert (cache - wide)[wide.isfinite()].abs().max() <= 1e-4


@pytest.mark.parametrize("int8_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_change_no_token(dtype: torch.dtype, int8_head: bool) -> None:
    torch.manual_seed(5)
    network, rows = make_network(dtype, int8_head=int8_head), make_rows(dtype, random.Random(5))
    alone = copied(rows, dtype)
    together, single = decode_step(network, rows), decode_step(network, alone)
    for _ in range(8):
        starts = [int(count) - 1 for count in rows.num_tokens]
        tokens = together(list(range(NUM_ROWS)), starts)
        assert tokens == [(single([row], [start]) or [-1])[0] for row, start in enumerate(starts)]
    for cache, other in zip(rows.kv_caches, alone.kv_caches, strict=True):
        assert torch.equal(cache.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("samples", [True, False])
def test_masked_steps_equal_the_reference(samples: bool) -> None:
    torch.manual_seed(3)
    rng = random.Random(3)
    network, rows = make_network(torch.float32), make_rows(torch.float32, rng)
    if not samples:
        rows.sample_table.do_sample.zero_()
    expected = copied(rows, torch.float64)
    run, reference = decode_step(network, rows), ops.decode_step(widened(network), expected)
    num_words = -(-VOCAB // 32)
    for _ in range(8):
        which = rng.sample(range(NUM_ROWS), rng.randint(2, NUM_ROWS))
        starts = [int(rows.num_tokens[row]) - 1 for row in which]
        num_masks = rng.randint(1, len(which))
        bits = torch.rand(num_masks, num_words * 32) < 0.1
        bits[:, rng.randrange(VOCAB)] = True
        bitmask = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int32))
        mask_of = torch.full((len(which),), -1)
        mask_of[torch.randperm(len(which))[:num_masks]] = torch.arange(num_masks)
        tokens = run(which, starts, (mask_of, bitmask))
        assert tokens is not None
        assert tokens == reference(which, starts, (mask_of, bitmask))
        assert all(mask < 0 or bits[mask, token] for token, mask in zip(tokens, mask_of.tolist(), strict=True))
    starts = [int(rows.num_tokens[row]) - 1 for row in (2, 4)]
    nothing = torch.zeros(1, num_words, dtype=torch.int32)
    assert run([2, 4], starts, (torch.tensor([-1, 0]), nothing)) is None  # no token may come
    assert [int(rows.num_tokens[row]) - 1 for row in (2, 4)] == starts
    with pytest.raises(ValueError, match=f"must have {num_words} words, got {num_words + 1}"):
        run([2], starts[:1], (torch.tensor([0]), torch.zeros(1, num_words + 1, dtype=torch.int32)))
    assert run([2, 4], starts) == reference([2, 4], starts)  # without masks again


def test_what_is_out_of_the_ordinary_changes_no_row() -> None:
    torch.manual_seed(1)
    network, rows = make_network(torch.float32), make_rows(torch.float32, random.Random(1))
    which, starts = [3, 5], [int(rows.num_tokens[row]) - 1 for row in (3, 5)]
    before = copied(rows, torch.float32)

    def refused(run_starts: list[int], *, logits: bool = True) -> bool:
        run = decode_step(network, rows)
        done = run(which, run_starts)
        if logits:
            assert run.logits(which, run_starts) is None
        unchanged = torch.equal(rows.token_ids, before.token_ids) and np.array_equal(rows.num_tokens, before.num_tokens)
        return done is None and unchanged

    assert refused([starts[0], starts[1] + 1])  # a token that nobody has sampled yet
    rows.num_blocks[1][5] = starts[1] // BLOCK_SIZE
    assert refused(starts)  # no block for the token
    rows.num_blocks[1][5] = -(-ROW_LEN // BLOCK_SIZE)
    for spoilt in (torch.nan, torch.inf):
        kept = network.embedding.weight[rows.token_ids[5, starts[1]]].clone()
        network.embedding.weight[rows.token_ids[5, starts[1]]] = spoilt
        assert refused(starts, logits=False)
        found = decode_step(network, rows).logits(which, starts)
        assert found is not None
        assert found.isfinite().all(1).tolist() == [True, False]
        network.embedding.weight[rows.token_ids[5, starts[1]]] = kept
    assert decode_step(network, rows)(which, starts) is not None
