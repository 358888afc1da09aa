"""How near op `fused_moe` comes to what memory allows: bytes of the experts that are hit, over time, beside reading.

Run:  python kernels-cpu/benchmarks/moe.py [--int8] [--experts 128] [--repeats 9]

Each line: one step of so many tokens through the experts of one layer of Qwen3-30B-A3B's shape (hidden 2048, experts
768 wide, 8 of a token). Every repetition takes another layer's weights, so that none are in a cache. Reading is
measured between the lines; figures are the shortest of the repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from quire_kernels_cpu.builds import build_name, library
from quire_kernels_cpu.moe import fused_moe
from quire_ops import Experts, LinearWeights
from quire_ops.torch_moe import torch_fused_moe

HIDDEN, INNER, PER_TOKEN, LAYERS = 2048, 768, 8, 3


def make_linear(outputs: int, inputs: int, *, int8: bool) -> LinearWeights:
    if int8:
        scale = torch.full((outputs,), 0.01 * inputs**-0.5, dtype=torch.bfloat16)
        return LinearWeights(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), None, scale)
    return LinearWeights(torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(0.0, inputs**-0.5))


def make_experts(num: int, *, int8: bool) -> Experts:
    return Experts(
        gate=tuple(make_linear(INNER, HIDDEN, int8=int8) for _ in range(num)),
        up=tuple(make_linear(INNER, HIDDEN, int8=int8) for _ in range(num)),
        down=tuple(make_linear(HIDDEN, INNER, int8=int8) for _ in range(num)),
        activation="silu",
    )


def shortest_s(runs: list[Callable[[], object]], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        runs[repeat % len(runs)]()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--int8", action="store_true", help="weights in int8")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [make_experts(args.experts, int8=args.int8) for _ in range(LAYERS)]
    expert_bytes = 3 * HIDDEN * INNER * (1 if args.int8 else 2)
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    print(f"build {build_name()}, {torch.get_num_threads()} threads, {expert_bytes / 1e6:.1f} MB an expert")
    for tokens in (1, 4, 16, 64, 512):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        ids = torch.stack([torch.randperm(args.experts)[:PER_TOKEN] for _ in range(tokens)])
        weights = torch.rand(tokens, PER_TOKEN)
        hit = len(ids.unique())
        read_s = shortest_s([lambda: library().quire_read(memory.data_ptr(), memory.nbytes)], args.repeats)
        rate = memory.nbytes / read_s

        def measured(make: Callable[[Experts], Callable[..., object]]) -> float:
            runs = [make(layer) for layer in layers]
            calls: list[Callable[[], object]] = [lambda run=run: run(x, ids, weights) for run in runs]  # noqa: B023
            return shortest_s(calls, args.repeats)

        ours, torchs = measured(fused_moe), measured(torch_fused_moe)
        bound = hit * expert_bytes / rate
        flops = 6 * HIDDEN * INNER * tokens * PER_TOKEN
        print(
            f"{tokens:4d} tokens, {hit:3d} experts: {ours * 1e3:8.2f} ms = {bound / ours:4.0%} of reading them at "
            f"{rate / 1e9:.1f} GB/s, {flops / ours / 1e12:.2f} TFLOP/s; torch {torchs * 1e3:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
