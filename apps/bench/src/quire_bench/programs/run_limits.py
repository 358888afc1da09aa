"""What this machine can do at best: rate of reading memory, rate of matrix products. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

REPEATS = 7
READ_BYTES = 1 << 30
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


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    memory = torch.ones(READ_BYTES // 4)
    read_s = best_seconds(memory.sum)
    del memory
    dtype = getattr(torch, settings["dtype"])
    left, right = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
    product_s = best_seconds(lambda: left @ right)
    figures = {"read_bytes_per_s": READ_BYTES / read_s, "matmul_flop_per_s": 2 * SIDE**3 / product_s}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
