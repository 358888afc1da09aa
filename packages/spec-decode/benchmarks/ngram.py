"""Time of one n-gram proposal: `python packages/spec-decode/benchmarks/ngram.py`."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Sequence

from quire_spec_decode import NgramDrafter


def median_us(drafter: NgramDrafter, token_ids: Sequence[int], repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        drafter.propose(token_ids, 4)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter(2, 4)
    print(f"{'tokens':>8} {'text':>10} {'list us':>9} {'array us':>9}")
    for length in (512, 4096, 32768):
        texts = {
            "no match": rng.sample(range(1000, 150_000), length),
            "words": [int(rng.paretovariate(0.6)) % 5000 for _ in range(length)],
            "periodic": [i % 97 for i in range(length)],
        }
        for name, tokens in texts.items():
            as_list, as_array = median_us(drafter, tokens), median_us(drafter, array("i", tokens))
            print(f"{length:>8} {name:>10} {as_list:>9.1f} {as_array:>9.1f}")


if __name__ == "__main__":
    main()
