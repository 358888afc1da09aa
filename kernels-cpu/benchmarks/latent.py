"""Multi-head latent attention beside what memory allows and beside torch's backend.

Run:  python kernels-cpu/benchmarks/latent.py [--dtype bfloat16|float32|float16] [--tokens 4096] [--repeats 9]

Rows of DeepSeek-V2 and V3 (a latent of 512, a rotated key of 64), 16 and 128 heads. Each line: op `latent_attention` of
one layer, op `head_linear` with the value part of `kv_b_proj` (512 -> 128 for each head), or `index_topk` (64 heads of
128) and `sparse_latent_attention` over the 2,048 tokens that it finds. Ours, torch's and plain reading of as many bytes
take turns; every turn takes another layer's memory, so that none is in a cache. Figures are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quire_kernels_cpu.builds import build_name, library
from quire_kernels_cpu.latent import head_linear, index_topk, latent_attention, sparse_latent_attention
from quire_ops.latent_attention import torch_latent_attention
from quire_ops.linear_ops import torch_head_linear
from quire_ops.sparse_attention import torch_index_topk, torch_sparse_latent_attention

RANK, ROTATED, NOPE, VALUE, BLOCK_SIZE, LAYERS = 512, 64, 128, 128, 16, 8
INDEX_HEADS, INDEX_SIZE, FOUND = 64, 128, 2048


@dataclass
class Step:
    """A layout of sequences that end with their queries."""

    query_lens: list[int]
    kv_lens: list[int]
    block_size: int = BLOCK_SIZE
    paths: None = None
    derived: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.kv_lens]
        blocks = torch.arange(1, sum(counts) + 1, dtype=torch.int32).split(counts)
        self.num_blocks = sum(counts) + 1
        self.block_table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        self.query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(self.kv_lens, dtype=torch.int32)


def medians_ms(runs: list[Callable[[int], object]], repeats: int) -> list[float]:
    """Of functions that take turns, each given the number of the layer."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, of_run in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(repeat % LAYERS)
            of_run.append(time.perf_counter() - start)
    return [median(of_run[1:]) * 1e3 for of_run in times]


def report(what: str, ms: list[float], flops: float) -> None:
    ours, torchs, reading = ms
    rate = flops / ours / 1e6
    print(
        f"{what:40s} {ours:9.2f} ms, {rate:6.1f} GFLOP/s; torch {torchs:9.2f} ms; reading {reading:6.2f} ms", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="that a decoded token sees")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dtype, width = getattr(torch, args.dtype), RANK + ROTATED
    torch.manual_seed(0)
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    print(f"build {build_name()}, {torch.get_num_threads()} threads, {args.dtype}")

    def read(num_bytes: int) -> Callable[[int], object]:
        places = memory.nbytes - num_bytes
        return lambda layer: library().quire_read(memory.data_ptr() + places * layer // LAYERS, num_bytes)

    def attend(what: str, heads: int, query_lens: list[int], kv_lens: list[int]) -> None:
        step = Step(query_lens, kv_lens)
        caches = [torch.randn(step.num_blocks, BLOCK_SIZE, width).to(dtype) for _ in range(LAYERS)]
        query = torch.randn(sum(query_lens), heads, width).to(dtype)
        size = {"scale": width**-0.5, "rank": RANK}
        seen = sum(count * length - count * (count - 1) // 2 for count, length in zip(query_lens, kv_lens, strict=True))
        runs: list[Callable[[int], object]] = [
            lambda layer: latent_attention(query, caches[layer], step, **size),
            lambda layer: torch_latent_attention(query, caches[layer], step, **size),
            read(sum(kv_lens) * width * dtype.itemsize),
        ]
        report(what, medians_ms(runs, args.repeats), 2.0 * seen * heads * (width + RANK))

    def project(heads: int, tokens: int) -> None:
        projections = [torch.randn(heads, NOPE + VALUE, RANK).to(dtype) for _ in range(LAYERS)]
        weights: list[Tensor] = [projection[:, NOPE:] for projection in projections]
        x = torch.randn(tokens, heads, RANK).to(dtype)
        runs: list[Callable[[int], object]] = [
            lambda layer: head_linear(x, weights[layer]),
            lambda layer: torch_head_linear(x, weights[layer]),
            read(heads * VALUE * RANK * dtype.itemsize),
        ]
        flops = 2.0 * tokens * heads * VALUE * RANK
        report(f"{heads} heads: head_linear, {tokens} tokens", medians_ms(runs, args.repeats), flops)

    def find(tokens: int) -> None:
        step = Step([tokens], [args.tokens])
        caches = [torch.randn(step.num_blocks, BLOCK_SIZE, INDEX_SIZE).to(dtype) for _ in range(LAYERS)]
        query = torch.randn(tokens, INDEX_HEADS, INDEX_SIZE).to(dtype)
        weights = torch.randn(tokens, INDEX_HEADS)
        runs: list[Callable[[int], object]] = [
            lambda layer: index_topk(query, weights, caches[layer], step, k=FOUND),
            lambda layer: torch_index_topk(query, weights, caches[layer], step, k=FOUND),
            read(args.tokens * INDEX_SIZE * dtype.itemsize),
        ]
        flops = 2.0 * tokens * args.tokens * INDEX_HEADS * INDEX_SIZE
        report(f"index_topk of {args.tokens}, {tokens} tokens", medians_ms(runs, args.repeats), flops)

    def attend_sparsely(tokens: int) -> None:
        num_blocks = args.tokens // BLOCK_SIZE
        caches = [torch.randn(num_blocks, BLOCK_SIZE, width).to(dtype) for _ in range(LAYERS)]
        query = torch.randn(tokens, 128, width).to(dtype)
        slots = torch.stack([torch.randperm(num_blocks * BLOCK_SIZE)[:FOUND].sort().values for _ in range(tokens)])
        size = {"scale": width**-0.5, "rank": RANK}
        runs: list[Callable[[int], object]] = [
            lambda layer: sparse_latent_attention(query, caches[layer], slots, **size),
            lambda layer: torch_sparse_latent_attention(query, caches[layer], slots, **size),
            read(tokens * FOUND * width * dtype.itemsize),
        ]
        flops = 2.0 * tokens * FOUND * 128 * (width + RANK)
        report(f"128 heads: over {FOUND} found, {tokens} tokens", medians_ms(runs, args.repeats), flops)

    for tokens in (1, 32):
        find(tokens)
        attend_sparsely(tokens)
    for heads in (16, 128):
        for sequences in (1, 8):
            what = f"{heads} heads: {sequences} decodes over {args.tokens} tokens"
            attend(what, heads, [1] * sequences, [args.tokens] * sequences)
        attend(f"{heads} heads: 1 decode over 600 tokens", heads, [1], [600])
        attend(f"{heads} heads: a prompt of 512", heads, [512], [512])
        attend(f"{heads} heads: 512 tokens behind {args.tokens}", heads, [512], [args.tokens + 512])
        for tokens in (1, 8, 512):
            project(heads, tokens)


if __name__ == "__main__":
    main()
