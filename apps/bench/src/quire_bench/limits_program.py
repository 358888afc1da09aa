"""What this machine can do at best, measured in a process of its own: `python -m quire_bench.limits_program`.

Reads a line of JSON (`dtype`, `num_threads`) and prints one with the fields of `MachineLimits`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from quire_bench.kernels import measure_limits


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["num_threads"]:
        torch.set_num_threads(settings["num_threads"])
    limits = measure_limits(torch.device("cpu"), getattr(torch, settings["dtype"]))
    print(json.dumps(asdict(limits)), flush=True)


if __name__ == "__main__":
    main()
