"""What this machine can do at best, measured in a process of its own: `python -m quire_bench.limits_program`.

Reads a line of JSON (`dtype`, `num_threads`) and prints one with the fields of `MachineLimits`. Each further line names
a rate, "read" or "multiply", and is answered by what it is now, measured for some milliseconds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from quire_bench.kernels import RateSampler, measure_limits


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    device, dtype = torch.device("cpu"), getattr(torch, settings["dtype"])
    print(json.dumps(asdict(measure_limits(device, dtype))), flush=True)
    sampler: RateSampler | None = None
    for line in sys.stdin:
        if sampler is None:
            sampler = RateSampler(dtype)
        print(json.dumps(sampler.sample(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
