"""What a collective of two processes of this host takes: shared memory, and gloo beside it, in turns.

    python packages/distributed/benchmarks/collectives.py [--bytes 16384] [--rounds 2000] [--turns 10]

Needs quire-kernels-cpu, compiled. Figures are microseconds from a call to its result, on rank 0: median, 99th
percentile and least. Other work on the machine shows in the percentile first; the least is what the code itself takes.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from quire_distributed import SharedMemoryCollectives, SharedMemoryRendezvous

Call = Callable[[], Any]


def make_calls(address: str, port: int, rank: int, num_bytes: int, spin_us: int | None) -> dict[str, Call]:
    """Name of each collective -> the call, of tensors of `num_bytes` bytes on each rank."""
    shared = SharedMemoryCollectives(address, rank, 2, spin_us=spin_us)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x = torch.randn(num_bytes // 4)
    summed = torch.zeros_like(x)
    gathered = [torch.empty_like(x) for _ in range(2)]
    return {
        "all_reduce, shared memory": lambda: shared.all_reduce(x),
        "all_reduce, gloo": lambda: dist.all_reduce(summed),
        "all_gather, shared memory": lambda: shared.all_gather(x),
        "all_gather, gloo": lambda: dist.all_gather(gathered, x),
        "barrier, shared memory": shared.barrier,
    }


def run(calls: dict[str, Call], rounds: int, turns: int) -> dict[str, list[float]]:
    """Microseconds of every call, after a turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            for _ in range(rounds // turns):
                start = time.perf_counter_ns()
                call()
                if turn:
                    times[name].append((time.perf_counter_ns() - start) / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=16384, help="of each rank's tensor, which is of float32")
    parser.add_argument("--rounds", type=int, default=2000, help="calls of each collective")
    parser.add_argument("--turns", type=int, default=10, help="how often shared memory and gloo alternate")
    parser.add_argument("--spin-us", type=int, help="how long a rank waits without sleep; by default as it sees fit")
    parser.add_argument("--rank-1", nargs=2, metavar=("ADDRESS", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_1:
        address, port = options.rank_1
        run(make_calls(address, int(port), 1, options.bytes, options.spin_us), options.rounds, options.turns)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with SharedMemoryRendezvous(2) as rendezvous:
        ours = [sys.executable, __file__, *sys.argv[1:], "--rank-1", rendezvous.address, str(port)]
        with subprocess.Popen(ours):
            calls = make_calls(rendezvous.address, port, 0, options.bytes, options.spin_us)
            times = run(calls, options.rounds, options.turns)
    print(f"{options.bytes} bytes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':28}{'median':>10}{'p99':>10}{'least':>10}")
    for name, each in times.items():
        p99 = statistics.quantiles(each, n=100)[98]
        print(f"{name:28}{statistics.median(each):10.1f}{p99:10.1f}{min(each):10.1f}")


if __name__ == "__main__":
    main()
