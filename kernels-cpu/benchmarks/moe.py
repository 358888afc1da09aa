"""How near op `fused_moe` comes to what memory allows: bytes of the experts that are hit, over time, beside reading.

Run:  python kernels-cpu/benchmarks/moe.py [--form bfloat16|int8|int4|fp8] [--experts 128] [--repeats 9]

Each line: one step of so many tokens through the experts of one layer of Qwen3-30B-A3B's shape (hidden 2048, experts
768 wide, 8 of a token). Every repetition takes another layer's weights, so that none are in a cache. Reading is
measured between the lines; figures are the shortest of the repetitions. Beside it: torch's backend, and each expert
through its own layers, which is what runs experts in forms that the op does not take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels_cpu.builds import build_name, library
from quire_kernels_cpu.moe import fused_moe
from quire_kernels_cpu.ops import grouped_linear, int8_linear, linear, silu_and_mul
from quire_ops import Experts, LinearWeights, RunExperts
from quire_ops.fused_moe import torch_fused_moe
from quire_ops.grouped import block_groups, pack_int4

HIDDEN, INNER, PER_TOKEN, LAYERS = 2048, 768, 8, 3


FORMS = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128, "fp8": 1.0 + 2 / 128}
"""Bytes of a weight, with its part of the scales."""


def make_linear(outputs: int, inputs: int, form: str) -> LinearWeights:
    if form == "bfloat16":
        return LinearWeights(torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(0.0, inputs**-0.5))
    elements = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    if form == "int8":
        return LinearWeights(elements, None, torch.full((outputs,), 0.01 * inputs**-0.5, dtype=torch.bfloat16))
    scale = block_groups(torch.full((outputs, inputs // 128), 0.1 * inputs**-0.5, dtype=torch.bfloat16))
    if form == "int4":
        return LinearWeights(pack_int4(elements >> 4), None, scale)
    return LinearWeights((elements / 127).to(torch.float8_e4m3fn), None, scale)


def make_experts(num: int, form: str) -> Experts:
    return Experts(
        gate=tuple(make_linear(INNER, HIDDEN, form) for _ in range(num)),
        up=tuple(make_linear(INNER, HIDDEN, form) for _ in range(num)),
        down=tuple(make_linear(HIDDEN, INNER, form) for _ in range(num)),
        activation="silu",
    )


def each_expert(experts: Experts) -> RunExperts:
    """Expert by expert, three products each."""

    def multiply(x: Tensor, one: LinearWeights) -> Tensor:
        if one.scale is None:
            return linear(x, one.weight, None)
        if one.scale.ndim == 1:
            return int8_linear(x, one.weight, one.scale, None)
        return grouped_linear(x, one.weight, one.scale, one.zero, None)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            rows, slots = torch.where(topk_ids == expert)
            inner = silu_and_mul(multiply(x[rows], experts.gate[expert]), multiply(x[rows], experts.up[expert]))
            out.index_add_(0, rows, multiply(inner, experts.down[expert]).float() * topk_weights[rows, slots, None])
        return out.to(x.dtype)

    return run


def shortest_s(runs: list[Callable[[], object]], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        runs[repeat % len(runs)]()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=list(FORMS), default="bfloat16", help="of the weights")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [make_experts(args.experts, args.form) for _ in range(LAYERS)]
    expert_bytes = 3 * HIDDEN * INNER * FORMS[args.form]
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    print(f"build {build_name()}, {torch.get_num_threads()} threads, {expert_bytes / 1e6:.1f} MB an expert")
    for tokens in (1, 8, 32, 64, 512):
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

        ours, torchs, each = measured(fused_moe), measured(torch_fused_moe), measured(each_expert)
        bound = hit * expert_bytes / rate
        flops = 6 * HIDDEN * INNER * tokens * PER_TOKEN
        print(
            f"{tokens:4d} tokens, {hit:3d} experts: {ours * 1e3:8.2f} ms = {bound / ours:4.0%} of reading them at "
            f"{rate / 1e9:.1f} GB/s, {flops / ours / 1e12:.2f} TFLOP/s; torch {torchs * 1e3:.2f} ms, "
            f"each expert {each * 1e3:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
