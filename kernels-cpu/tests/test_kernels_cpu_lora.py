"""Adapters within the whole stack and whole decode steps: against the reference, and that nobody else notices."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from kernels_cpu_steps import Layout
from test_kernels_cpu_decode_step import NUM_ROWS, copied, make_network, make_rows, widened
from test_kernels_cpu_decoder import KV_HEADS, SHAPES, TOLERANCE, _widened, angles, head_dim_of, make_stack

from quire_kernels_cpu.decode_step import decode_step
from quire_kernels_cpu.decoder import decoder_stack
from quire_ops import DecoderStack, LoraTokens, LoraWeights, ops

ATTENTION, GATED = ("q", "k", "v", "o"), ("gate", "up", "down")
SLOTS, MAX_RANK = 3, 6
RANKS = (6, 1, 3)


def with_adapters(stack: DecoderStack) -> DecoderStack:
    """Adapters for every matrix, of mixed ranks; slot 1 has none for k, slot 2 is adjusted where it can be."""

    def adapters(name: str, outputs: int, inputs: int) -> LoraWeights:
        ranks = [0 if (name, slot) == ("k", 1) else rank for slot, rank in enumerate(RANKS)]
        a, b = torch.randn(SLOTS, MAX_RANK, inputs) * inputs**-0.5, torch.randn(SLOTS, MAX_RANK, outputs) * 0.5
        for slot, rank in enumerate(ranks):
            a[slot, rank:] = b[slot, rank:] = 0
        dtype = stack.dtype
        return LoraWeights(
            a=a.to(dtype),
            b=b.to(dtype),
            ranks=torch.tensor(ranks, dtype=torch.int32),
            adjusted=torch.tensor([0, 0, 1], dtype=torch.int32),
            scale=torch.rand(SLOTS, outputs) + 0.5,
            shift=torch.randn(SLOTS, outputs) * 0.1,
        )

    hidden = stack.hidden_size

    def adapted(layer):
        inner, heads = layer.feed_forward.gate.weight.shape[0], layer.mixer.q.weight.shape[0]
        inputs = {"o": heads, "down": inner}

        def with_own(part, names):
            linears = {name: getattr(part, name) for name in names}
            return {
                name: linear._replace(lora=adapters(name, linear.weight.shape[0], inputs.get(name, hidden)))
                for name, linear in linears.items()
            }

        feed_forward = layer.feed_forward._replace(**with_own(layer.feed_forward, GATED))
        mixer = dataclasses.replace(layer.mixer, **with_own(layer.mixer, ATTENTION))
        return dataclasses.replace(layer, feed_forward=feed_forward, mixer=mixer)

    return dataclasses.replace(stack, layers=tuple(adapted(layer) for layer in stack.layers))


def widened_with_adapters(stack: DecoderStack) -> DecoderStack:
    wide = _widened(stack)

    def with_those_of(part, own, names):
        return {name: getattr(part, name)._replace(lora=getattr(own, name).lora) for name in names}

    layers = tuple(
        dataclasses.replace(
            layer,
            feed_forward=layer.feed_forward._replace(**with_those_of(layer.feed_forward, own.feed_forward, GATED)),
            mixer=dataclasses.replace(layer.mixer, **with_those_of(layer.mixer, own.mixer, ATTENTION)),
        )
        for layer, own in zip(wide.layers, stack.layers, strict=True)
    )
    return dataclasses.replace(wide, layers=layers)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[5:6] + SHAPES[8:9])
def test_a_mixed_step_equals_the_reference(dtype: torch.dtype, shape: dict[str, object]) -> None:
    torch.manual_seed(3)
    chooser = random.Random(3)
    stack = with_adapters(make_stack(dtype, **shape))  # type: ignore[arg-type]
    query_lens = [chooser.choice([1, 1, 5, 33]) for _ in range(7)]
    layout = Layout(7, query_lens, [count + chooser.choice([0, 3, 40]) for count in query_lens])
    caches = tuple(layout.cache(KV_HEADS, head_dim_of(stack), dtype) for _ in stack.layers)
    expected_caches = tuple(cache.double() for cache in caches)
    slots = np.repeat(np.array([2, -1, 0, 1, 0, -1, 2], dtype=np.int32), query_lens)
    x = torch.randn(sum(query_lens), stack.hidden_size).to(dtype)
    cos, sin = angles(layout, head_dim_of(stack), dtype)
    run_reference = ops.decoder_stack(widened_with_adapters(stack))
    lora = LoraTokens.of(slots)
    expected = run_reference(
        x.double(), [(cos.double(), sin.double())], [layout], (0, 0, 0), expected_caches, lora=lora
    )
    got = decoder_stack(stack)(x, [(cos, sin)], [layout], (0, 0, 0), caches, lora=lora)
    assert (got.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        written = expected_cache.isfinite()
        assert torch.equal(cache.isfinite(), written)
        assert (cache.double() - expected_cache)[written].abs().max() <= TOLERANCE[dtype] * 10


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
def test_chunks_and_neighbours_change_no_bit(dtype: torch.dtype, weights: str) -> None:
    torch.manual_seed(0)
    stack = with_adapters(make_stack(dtype, weights=weights, inner=192))
    run = decoder_stack(stack)
    lengths, slots = [50, 1, 37, 20], [2, -1, -1, 0]
    whole = Layout(16, lengths, lengths)
    xs = torch.randn(sum(lengths), 64).to(dtype)

    def fresh() -> tuple[torch.Tensor, ...]:
        return tuple(torch.full((whole.num_blocks, 2, KV_HEADS, 16, 32), float("nan")).to(dtype) for _ in stack.layers)

    caches, again = fresh(), fresh()
    of_tokens = LoraTokens.of(np.repeat(np.array(slots, dtype=np.int32), lengths))
    together = run(xs, [angles(whole, 32, dtype)], [whole], (0, 0, 0), caches, lora=of_tokens)
    for row, length in enumerate(lengths):
        begin, done = int(whole.query_start_loc[row]), 0
        while done < length:
            chunk = min(length - done, random.Random(done).choice([1, 3, 17]))
            alone = Layout(16, [chunk], [done + chunk], whole.block_table[row : row + 1].contiguous())
            rows = slice(begin + done, begin + done + chunk)
            lora = LoraTokens.of(np.full(chunk, slots[row], dtype=np.int32))
            got = run(xs[rows], [angles(alone, 32, dtype)], [alone], (0, 0, 0), again, lora=lora)
            assert torch.equal(got, together[rows])
            done += chunk
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(caches, again, strict=True))


def test_decode_steps_equal_the_reference_and_rows_alone() -> None:
    torch.manual_seed(4)
    network = make_network(torch.float32)
    network = dataclasses.replace(network, stack=with_adapters(network.stack))
    rows = make_rows(torch.float32, random.Random(4))
    rows.lora_slots[:] = [0, -1, 2, 2, 1, -1, 0, -1, 1][:NUM_ROWS]
    expected, alone = copied(rows, torch.float64), copied(rows, torch.float32)
    wide = dataclasses.replace(widened(network), stack=widened_with_adapters(network.stack))
    run, reference, single = (
        decode_step(network, rows),
        ops.decode_step(wide, expected),
        decode_step(network, alone),
    )
    plain = decode_step(
        network, dataclasses.replace(copied(rows, torch.float32), lora_slots=np.full(NUM_ROWS, -1, np.int32))
    )
    everyone, differ = list(range(NUM_ROWS)), 0
    for _ in range(6):
        starts = [int(count) - 1 for count in rows.num_tokens]
        tokens = run(everyone, starts)
        assert tokens == reference(everyone, starts)
        assert tokens == [(single([row], [start]) or [-1])[0] for row, start in enumerate(starts)]
        differ += tokens != plain(everyone, starts)
    assert differ  # adapters do something
    for cache, other in zip(rows.kv_caches, alone.kv_caches, strict=True):
        assert torch.equal(cache.nan_to_num(), other.nan_to_num())
