"""What this machine can do at best: rate of reading memory, rate of matrix products. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

REPEATS = 7
READ_BYTES = 1 << 29
"""Far beyond any cache."""
SIDE = 2048


def best_seconds(work: Callable[[], object]) -> float:
    """The shortest time: a limit is what the machine can do, not what it does while others use it."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def shortest_read_s() -> float:
    """Time of reading `READ_BYTES` once, by whatever reads fastest here: none of these does all machines justice."""
    floats = torch.ones(READ_BYTES // 4)
    halves, one = floats.view(torch.bfloat16).view(-1, SIDE), torch.ones(SIDE, dtype=torch.bfloat16)
    return min(best_seconds(work) for work in (floats.sum, lambda: torch.dot(floats, floats), lambda: halves @ one))


def product_seconds(side: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    return best_seconds(lambda: left @ right)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    read_s = shortest_read_s()
    # A processor without instructions for it multiplies bfloat16 fifty times slower than float32.
    dtype = min((getattr(torch, settings["dtype"]), torch.float32), key=lambda dtype: product_seconds(256, dtype))
    product_s = product_seconds(SIDE, dtype)
    figures = {"read_bytes_per_s": READ_BYTES / read_s, "matmul_flop_per_s": 2 * SIDE**3 / product_s}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
