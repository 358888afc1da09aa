"""How near the kernels come to what memory and torch's matrix product allow, on the shape of Qwen3-0.6B.

Run:  python kernels-cpu/benchmarks/stack.py [--weights int4] [--kv-cache fp8] [--layers 28] [--repeats 5]

Each line: the whole stack of layers for one step, attention alone, and the LM head. The rates of a machine change
within seconds, so its limits (reading memory, torch's product of 2048 x 2048, in float32 where there is no AMX) are
measured in turn with each of these, tens of milliseconds apart: shares are medians of neighbours, figures medians, and
behind them stands how far the rate moved (10th to 90th percentile).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from kernels_cpu_steps import Layout

from quire_kernels_cpu.builds import build_name, library
from quire_kernels_cpu.decoder import decoder_stack
from quire_kernels_cpu.ops import grouped_linear, int8_linear, lm_head, paged_attention, w8a8_linear
from quire_ops import AttentionWeights, DecoderLayerWeights, DecoderStack, GatedWeights, LinearWeights, NormWeights
from quire_ops.kv_format import rows_of

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 1024, 3072, 16, 8, 128, 151936
STEPS: list[tuple[str, int, int, int]] = [  # name, sequences, tokens of each, context of each
    ("1 decode at 128", 1, 1, 128),
    ("5 tokens verified", 1, 5, 132),
    ("8 decodes at 128", 8, 1, 128),
    ("32 decodes at 128", 32, 1, 128),
    ("32 decodes at 1024", 32, 1, 1024),
    ("1 decode at 16384", 1, 1, 16384),
    ("prefill of 512", 1, 512, 512),
    ("prefill of 2048", 1, 2048, 2048),
]
KV_CACHES = {
    "plain": (torch.bfloat16, DIM),
    "fp8": (torch.float8_e4m3fn, DIM),
    "int8": (torch.int8, DIM + 4),
    "int4": (torch.uint8, DIM // 2 + 4),
}
"""Format -> the dtype of a row, and how many elements it has."""


class Measured(NamedTuple):
    """A call, beside the rate that was measured right before it."""

    seconds: list[float]
    rates: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def share(self, work: float) -> float:
        """`work` (bytes or operations) in the time of the call, as a share of the rate; the median of neighbours."""
        return statistics.median(work / seconds / rate for seconds, rate in zip(self.seconds, self.rates, strict=True))


def timed_s(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(run: Callable[[], object], rate: Callable[[], float], repeats: int) -> Measured:
    """Rate and call, one after the other, `repeats` times, after a call that does not count."""
    run()
    measured = Measured([], [])
    for _ in range(repeats):
        measured.rates.append(rate())
        measured.seconds.append(timed_s(run))
    return measured


def spread(rates: list[float]) -> str:
    tenths = statistics.quantiles(rates, n=10)
    return f"{tenths[0] / 1e9:.0f} to {tenths[-1] / 1e9:.0f}"


def make_linear(outputs: int, inputs: int, weights: str) -> LinearWeights:
    if weights == "plain":
        return LinearWeights((torch.randn(outputs, inputs) * inputs**-0.5).bfloat16())
    if weights in ("int8", "w8a8"):
        scale = torch.full((outputs,), 0.01 * inputs**-0.5, dtype=torch.bfloat16)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        return LinearWeights(weight, None, scale, input_scale=torch.zeros(1) if weights == "w8a8" else None)
    scale = torch.full((outputs // 16, inputs // 128, 16), 0.1 * inputs**-0.5, dtype=torch.bfloat16)
    if weights == "int4":
        return LinearWeights(torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8), None, scale)
    return LinearWeights(torch.randn(outputs, inputs).to(torch.float8_e4m3fn), None, scale)


def make_stack(num_layers: int, weights: str) -> DecoderStack:
    norm = NormWeights(weight=torch.ones(HIDDEN, dtype=torch.bfloat16), eps=1e-6)
    head_norm = torch.ones(DIM, dtype=torch.bfloat16)
    layers = tuple(
        DecoderLayerWeights(
            input_norm=norm,
            mixer=AttentionWeights(
                q=make_linear(HEADS * DIM, HIDDEN, weights),
                k=make_linear(KV_HEADS * DIM, HIDDEN, weights),
                v=make_linear(KV_HEADS * DIM, HIDDEN, weights),
                o=make_linear(HIDDEN, HEADS * DIM, weights),
                head_dim=DIM,
                q_norm=head_norm,
                k_norm=head_norm,
                norm_eps=1e-6,
                scale=DIM**-0.5,
                int8_products=weights == "w8a8",
            ),
            cache=i,
            feed_forward_norm=norm,
            feed_forward=GatedWeights(
                gate=make_linear(INNER, HIDDEN, weights),
                up=make_linear(INNER, HIDDEN, weights),
                down=make_linear(HIDDEN, INNER, weights),
            ),
        )
        for i in range(num_layers)
    )
    return DecoderStack(layers=layers, final_norm=norm, hidden_size=HIDDEN, dtype=torch.bfloat16, rotary_dim=DIM)


def linears(layer: DecoderLayerWeights) -> tuple[LinearWeights, ...]:
    """All matrices of a layer."""
    attention, gated = layer.mixer, layer.feed_forward
    assert isinstance(attention, AttentionWeights)
    assert isinstance(gated, GatedWeights)
    return attention.q, attention.k, attention.v, attention.o, gated.gate, gated.up, gated.down


def nbytes(linear: LinearWeights) -> int:
    """Of all its tensors."""
    return sum(part.nbytes for part in linear if isinstance(part, Tensor))


def make_cache(num_blocks: int, kv_cache: str) -> Tensor:
    """As the runner allocates it: numpy asks for huge pages."""
    dtype, width = KV_CACHES[kv_cache]
    shape = (num_blocks, 2, KV_HEADS, 16, width)
    cache = torch.from_numpy(np.zeros(dtype.itemsize * math.prod(shape), dtype=np.uint8)).view(dtype).view(shape)
    if dtype.is_floating_point:
        cache.copy_(torch.randn(shape))
    else:
        codes, scales = rows_of(cache)
        codes.view(torch.uint8).random_(1, 128)
        scales.copy_(torch.tensor([0.01]).view(dtype))  # a row's float32 scale
    return cache


def head_logits(x: Tensor, head: LinearWeights) -> Tensor:
    if head.scale is None:
        return lm_head(x, head.weight)
    if head.input_scale is not None:
        return w8a8_linear(x, head.weight, head.scale, head.input_scale, None, wide=True)
    if head.scale.ndim == 1:
        return int8_linear(x, head.weight, head.scale, None, wide=True)
    return grouped_linear(x, head.weight, head.scale, None, None, wide=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    codings = ("plain", "int8", "w8a8", "int4", "fp8")
    parser.add_argument("--weights", choices=codings, default="plain", help="of all matrices")
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="plain", help="its format")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    stack = make_stack(args.layers, args.weights)
    run = decoder_stack(stack)
    weight_bytes = sum(nbytes(each) for layer in stack.layers for each in linears(layer))
    num_weights = args.layers * HIDDEN * (2 * (HEADS + KV_HEADS) * DIM + 3 * INNER)
    in_int8 = args.weights == "w8a8"
    head = make_linear(VOCAB, HIDDEN, args.weights)
    head_bytes = nbytes(head)
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    # Without AMX or AVX512-BF16 torch multiplies bfloat16 fifty times slower than float32.
    square = torch.randn(2048, 2048, dtype=torch.bfloat16 if build_name() in ("amx", "avx512bf16") else torch.float32)

    def read_bytes_per_s() -> float:
        return memory.nbytes / timed_s(lambda: library().quire_read(memory.data_ptr(), memory.nbytes))

    def product_flop_per_s() -> float:
        return 2 * 2048**3 / timed_s(lambda: torch.mm(square, square))

    print(f"build {build_name()}, {torch.get_num_threads()} threads, {weight_bytes / 1e9:.2f} GB of weights in layers")
    for name, sequences, tokens, context in STEPS:
        is_read = tokens < 16  # few rows: bound by reading
        repeats = args.repeats if is_read else max(3, args.repeats // 3)
        layout = Layout(16, [tokens] * sequences, [context] * sequences)
        caches = tuple(make_cache(layout.num_blocks, args.kv_cache) for _ in stack.layers)
        x = torch.randn(sequences * tokens, HIDDEN).bfloat16()
        cos = torch.ones(len(x), 1, DIM).bfloat16()
        query = torch.randn(len(x), HEADS, DIM).bfloat16()

        def whole() -> object:
            return run(x, [(cos, cos)], [layout], (0,) * args.layers, caches)  # noqa: B023 (called at once)

        def attend() -> None:
            for cache in caches:  # noqa: B023 (called at once)
                paged_attention(query, cache, layout, scale=DIM**-0.5, int8_products=in_int8)  # noqa: B023 (called at once)

        bound = read_bytes_per_s if is_read else product_flop_per_s
        of_stack = in_turn(whole, bound, repeats)
        attention = in_turn(attend, read_bytes_per_s, repeats)
        of_head = in_turn(lambda: head_logits(x[:: max(1, tokens)], head), read_bytes_per_s, repeats)  # noqa: B023 (called at once)
        kv_bytes = sequences * context * KV_HEADS * 2 * caches[0][0, 0, 0, 0].nbytes * args.layers
        flops = 2 * num_weights * len(x) + (2 * HEADS * DIM * context * len(x) * args.layers if tokens > 1 else 0)
        line = f"{name:19s} stack {of_stack.median_s * 1e3:8.1f} ms"
        line += (
            f" = {of_stack.share(weight_bytes + kv_bytes):4.0%} of reading weights and keys "
            f"({spread(of_stack.rates)} GB/s)"
            if is_read
            else f" = {flops / of_stack.median_s / 1e12:.2f} TFLOP/s, {of_stack.share(flops):4.0%} of torch's product "
            f"({spread(of_stack.rates)} GFLOP/s)"
        )
        print(
            f"{line}; attention {attention.median_s * 1e3:.1f} ms ({attention.share(kv_bytes):.0%} of reading); "
            f"LM head {of_head.median_s * 1e3:.1f} ms ({of_head.share(head_bytes):.0%}, {spread(of_head.rates)} GB/s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
