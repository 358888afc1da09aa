"""Ranks that share a network and meet inside one call give the bits of one rank. Ranks are threads here."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kernels_cpu_steps import Layout
from test_kernels_cpu_decode_step import GROUP_OF_LAYER, HEAD_DIM, NUM_ROWS, VOCAB, copied, make_network, make_rows
from test_kernels_cpu_decoder import KV_HEADS, RULES, angles, make_stack

from quire_interfaces import RankDeadError
from quire_kernels_cpu.builds import library
from quire_kernels_cpu.decode_step import decode_step
from quire_kernels_cpu.decoder import decoder_stack
from quire_ops import AttentionWeights, DecoderLayerWeights, DecodeRows, DecoderStack, LinearWeights

SIZE = 2
HIDDEN, INNER = (40, 24), (96, 64)
"""Outputs of the residual stream and of the inner width of each rank."""


@dataclasses.dataclass
class Group:
    """One rank's end of a group (`quire_ops.decoder_stack.RankGroup`)."""

    rank: int
    handle: int
    size: int = SIZE

    def check(self) -> None:
        gone: int = library().quire_group_failed_rank(self.handle)
        if gone >= 0:
            raise RankDeadError(gone, "it is gone")


@contextmanager
def groups(capacity: int = 1 << 16) -> Iterator[list[Group]]:
    """The ends of a new group."""
    fd = os.memfd_create("group")
    handles = [ctypes.c_void_p() for _ in range(SIZE)]
    assert library().quire_group_create(fd, SIZE, capacity, 1 << 12) == 0
    for rank, handle in enumerate(handles):
        assert library().quire_group_join(fd, rank, SIZE, 0, ctypes.addressof(handle)) == 0
    os.close(fd)
    yield [Group(rank, handle.value or 0) for rank, handle in enumerate(handles)]
    for handle in handles:
        library().quire_group_delete(handle)


def on_ranks(ends: list[Group], run: Callable[[Group], Any], threads: int = 1) -> list[Any]:
    """What each rank gives."""
    before = torch.get_num_threads()

    def start(group: Group) -> Any:
        torch.set_num_threads(threads)  # of this thread's teams
        return run(group)

    try:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(start, ends))
    finally:
        torch.set_num_threads(before)


def rows_of(linear: LinearWeights, sizes: tuple[int, ...], rank: int, *, gathers: bool) -> LinearWeights:
    """A rank's outputs of a layer whose weights lie row by row."""
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    parts = (None if part is None else part[own].contiguous() for part in linear[:3])
    return LinearWeights(*parts, rank_sizes=sizes if gathers else ())  # type: ignore[arg-type]


def shard_layer(layer: DecoderLayerWeights, rank: int) -> DecoderLayerWeights:
    """A rank's part of a layer; heads go one key-value head to each rank, unless all have one norm."""
    mixer, part = layer.mixer, layer.feed_forward
    assert isinstance(mixer, AttentionWeights)
    queries, keys = mixer.q.weight.shape[0] // SIZE, mixer.k.weight.shape[0] // SIZE
    whole = mixer.q_norm is not None and len(mixer.q_norm) > mixer.head_dim
    heads = {
        name: rows_of(getattr(mixer, name), (each,) * SIZE, rank, gathers=whole)
        for name, each in (("q", queries), ("k", keys), ("v", keys))
    }
    sinks = mixer.sinks if mixer.sinks is None or whole else mixer.sinks.chunk(SIZE)[rank].contiguous()
    mixer = dataclasses.replace(
        mixer,
        **heads,
        o=rows_of(mixer.o, HIDDEN, rank, gathers=True),
        sinks=sinks,
        rank_widths=() if whole else (queries,) * SIZE,
    )
    gated = part if part is None or hasattr(part, "gate") else getattr(part, "shared", None)
    if gated is not None:
        widths = INNER if len(gated.gate.weight) == sum(INNER) else (16, 16)
        own = gated._replace(
            gate=rows_of(gated.gate, widths, rank, gathers=False),
            up=rows_of(gated.up, widths, rank, gathers=False),
            down=rows_of(gated.down, HIDDEN, rank, gathers=True),
            rank_widths=widths,
        )
        part = own if gated is part else dataclasses.replace(part, shared=own)  # type: ignore[type-var]
    return dataclasses.replace(layer, mixer=mixer, feed_forward=part)


def shard(stack: DecoderStack, group: Group) -> DecoderStack:
    return dataclasses.replace(
        stack, layers=tuple(shard_layer(layer, group.rank) for layer in stack.layers), group=group
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int8", "attention_out_norm": True, "feed_forward_out_norm": True},
        {"experts": "plain", "shared": True, "sinks": True},
        {"all_heads": True, "activation": "gelu"},
    ],
)
def test_a_prefill_of_ranks_has_the_bits_of_one(options: dict[str, Any], dtype: torch.dtype, threads: int) -> None:
    """Slices are smaller than what the ranks gather, so that it goes in pieces."""
    torch.manual_seed(1)
    stack = make_stack(dtype, **options)
    layout = Layout(16, [1, 30, 1, 44], [50, 30, 1, 90])
    caches = tuple(layout.cache(KV_HEADS, HEAD_DIM, dtype) for _ in stack.layers)
    x, turns = torch.randn(76, 64).to(dtype), [angles(layout, HEAD_DIM, dtype)]

    def run(stack: DecoderStack, heads: slice) -> Any:
        own = tuple(cache[:, :, heads].clone() for cache in caches)
        return decoder_stack(stack)(x, turns, [layout], (0, 0, 0), own), own

    expected, written = run(stack, slice(None))
    each = [slice(None)] * SIZE if options.get("all_heads") else [slice(0, 1), slice(1, 2)]
    with groups(capacity=4096) as ends:
        found = on_ranks(ends, lambda group: run(shard(stack, group), each[group.rank]), threads)
    for heads, (hidden, own) in zip(each, found, strict=True):
        assert torch.equal(hidden, expected)
        for cache, whole in zip(own, written, strict=True):
            assert torch.equal(cache.nan_to_num(), whole[:, :, heads].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "int8 head", "experts", "factors"])
def test_decode_steps_of_ranks_have_the_bits_of_one(kind: str, dtype: torch.dtype) -> None:
    """Tokens of greedy and sampled rows, with masks and without, and logits; ranks share the embedding."""
    torch.manual_seed(2)
    rng = random.Random(2)
    experts = "plain" if kind == "experts" else None
    network = make_network(dtype, int8_head=kind == "int8 head", experts=experts, rule=RULES[0])
    if kind == "factors":
        network = dataclasses.replace(network, embedding_factor=1.7, logits_factor=0.4, logits_soft_cap=5.0)
    rows = make_rows(dtype, rng)
    of_ranks = [copied(rows, dtype) for _ in range(SIZE)]
    greedy = torch.tensor([row % 2 == 0 for row in range(NUM_ROWS)])
    every = list(range(NUM_ROWS))
    masks = torch.randint(0, NUM_ROWS, (NUM_ROWS,)) % 2 - 1, torch.randint(-(2**31), 2**31, (1, -(-VOCAB // 32)))
    masks = masks[0], masks[1].int()

    def run(network: Any, rows: DecodeRows) -> list[Any]:
        step = decode_step(network, rows)
        found: list[Any] = []
        for number in range(6):
            which = [row for row in every if greedy[row]] if number == 3 else every
            starts = [int(rows.num_tokens[row]) - 1 for row in which]
            found.append(step.logits(which, starts))
            found.append(step(which, starts, masks if number == 4 else None))
        return found

    expected = run(network, rows)
    assert all(each is not None for each in expected)

    def run_rank(group: Group) -> list[Any]:
        own, heads = of_ranks[group.rank], slice(group.rank, group.rank + 1)
        own = dataclasses.replace(own, kv_caches=tuple(cache[:, :, heads].clone() for cache in own.kv_caches))
        sizes = (160, VOCAB - 160)
        head = rows_of(network.head, sizes, group.rank, gathers=True)
        table = rows_of(network.embedding, sizes, group.rank, gathers=False)
        shared = dataclasses.replace(network, stack=shard(network.stack, group), head=head)
        return run(dataclasses.replace(shared, embedding=table, embedding_rows=sizes), own)

    with groups() as ends:
        for found in on_ranks(ends, run_rank):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
    assert len(GROUP_OF_LAYER) == len(rows.kv_caches)


def test_a_rank_that_is_gone_ends_the_call() -> None:
    """The other rank never comes; one that fails later fails at once."""
    torch.manual_seed(3)
    network, rows = make_network(torch.float32), make_rows(torch.float32, random.Random(3))
    with groups() as ends:
        first = ends[0]
        own = dataclasses.replace(rows, kv_caches=tuple(cache[:, :, :1].clone() for cache in rows.kv_caches))
        step = decode_step(dataclasses.replace(network, stack=shard(network.stack, first)), own)
        known = rows.num_tokens.copy()
        timer = threading.Timer(0.3, lambda: library().quire_group_fail(ends[1].handle, 1, b"it is gone"))
        start_s = time.monotonic()
        timer.start()
        with pytest.raises(RankDeadError, match="rank 1 is gone"):
            step([0, 1], [int(known[0]) - 1, int(known[1]) - 1])
        assert time.monotonic() - start_s >= 0.3
        assert (rows.num_tokens == known).all()
        layout = Layout(16, [3], [3])
        caches = tuple(layout.cache(1, HEAD_DIM, torch.float32) for _ in network.stack.layers)
        turns = [angles(layout, HEAD_DIM, torch.float32)]
        with pytest.raises(RankDeadError, match="rank 1 is gone"):
            decoder_stack(shard(network.stack, first))(torch.randn(3, 64), turns, [layout], (0, 0, 0), caches)
