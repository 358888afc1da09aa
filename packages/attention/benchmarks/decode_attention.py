"""Time of the attention of one decode step, all layers: write and attend, on random caches.

    python packages/attention/benchmarks/decode_attention.py --dtype bfloat16 --sequences 32 --blocks interleaved

Knows only quire_attention: no network, no weights. Prints the median and the best of some steps in milliseconds, the
processor time of the best, and the bytes of keys and values that a step reads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from quire_attention import select_attention_backend
from quire_ops import OpRequest, PagedLayout, kv_cache_shape


def make_layout(lengths: list[int], tables: list[list[int]], block_size: int) -> PagedLayout:
    """One new token per sequence."""
    widest = max(map(len, tables))
    slots = [
        table[(length - 1) // block_size] * block_size + (length - 1) % block_size
        for table, length in zip(tables, lengths, strict=True)
    ]
    return PagedLayout(
        query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
        query_lens=[1] * len(lengths),
        kv_lens=list(lengths),
    )


def block_tables(lengths: list[int], block_size: int, order: str, rng: random.Random) -> list[list[int]]:
    """Consecutive blocks; or consecutive prompts and interleaved decodes (the usual case); or shuffled."""
    counts = [-(-length // block_size) for length in lengths]
    free = list(range(1, sum(counts) + 1))
    if order == "shuffled":
        rng.shuffle(free)
    if order != "interleaved":
        return [[free.pop(0) for _ in range(count)] for count in counts]
    tables = [[free.pop(0) for _ in range(count // 2)] for count in counts]
    while free:
        for table, count in zip(tables, counts, strict=True):
            if len(table) < count:
                table.append(free.pop(0))
    return tables


def main() -> None:
    """Parse the flags, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--blocks", default="interleaved", choices=["consecutive", "interleaved", "shuffled"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    rng, dtype = random.Random(0), getattr(torch, args.dtype)
    lengths = [rng.randint(args.shortest, args.longest) for _ in range(args.sequences)]
    tables = block_tables(lengths, args.block_size, args.blocks, rng)
    backend = select_attention_backend(
        OpRequest(dtype=dtype, sizes={"head_dim": args.head_dim, "queries_per_kv_head": args.heads // args.kv_heads}),
        args.backend,
    ).backend
    num_blocks = max(map(max, tables)) + 1
    shape = kv_cache_shape(num_blocks, args.block_size, args.kv_heads, args.head_dim)
    caches = [torch.randn(shape).to(dtype) for _ in range(args.layers)]
    query = torch.randn(args.sequences, args.heads, args.head_dim).to(dtype)
    key = torch.randn(args.sequences, args.kv_heads, args.head_dim).to(dtype)
    times_ms, cpu_ms = [], []
    with torch.inference_mode():
        for _ in range(args.steps):
            layout = make_layout(lengths, tables, args.block_size)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for cache in caches:
                backend.write_kv_cache(key, key, cache, layout.slot_mapping)
                backend.paged_attention(query, cache, layout, scale=args.head_dim**-0.5, sliding_window=args.window)
            times_ms.append((time.perf_counter() - begin) * 1000)
            cpu_ms.append((time.process_time() - cpu_begin) * 1000)
    read = sum(lengths) * 2 * args.kv_heads * args.head_dim * dtype.itemsize * args.layers
    print(
        f"{args.backend} {args.dtype} {args.sequences} sequences, {args.blocks} blocks of {args.block_size}: "
        f"median {statistics.median(times_ms):.1f} ms, best {min(times_ms):.1f} ms "
        f"(processor {min(cpu_ms):.1f} ms) for {args.layers} layers; "
        f"reads {read / 1e6:.0f} MB, {read / min(times_ms) / 1e6:.1f} GB/s at best"
    )


if __name__ == "__main__":
    main()
