"""Host cost of the KV cache: hashing a long prompt, and the calls the scheduler makes for every request in every step.

    python packages/kv-cache/benchmarks/hashing.py [--num-tokens 100000] [--repeats 15] [--check]

Prints medians of processor time, so that other work on the machine counts as little as possible. With --check the
exit status is 1 when hashing misses its bar (at 100,000 tokens: xxhash 8 ms, sha256 15 ms; the bars hold for a 2-core
machine with SHA instructions).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

from quire_interfaces import FullAttentionSpec, Request, SamplingParams
from quire_kv_cache import KVCacheConfig, KVCacheManager, hash_blocks, plan_kv_cache

BARS_MS = {"xxhash": 8.0, "sha256": 15.0}
NUM_DECODES = 256


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median processor seconds of one call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def make_request(name: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=name, prompt_token_ids=token_ids, sampling_params=SamplingParams(), seed=0, max_tokens=1000
    )


def measure_hashing(num_tokens: int, repeats: int) -> bool:
    """Print one line per algorithm; False when a bar was missed."""
    rng = random.Random(0)
    token_ids = [rng.randrange(150_000) for _ in range(num_tokens)]
    fine = True
    for algorithm in ("sha256", "xxhash", "sha256_cbor", "xxhash_cbor"):
        elapsed_ms = 1e3 * median_s(lambda algorithm=algorithm: hash_blocks(token_ids, algorithm=algorithm), repeats)
        bar_ms = BARS_MS.get(algorithm)
        met = bar_ms is None or num_tokens != 100_000 or elapsed_ms < bar_ms
        fine &= met
        note = "" if bar_ms is None else f"   bar at 100,000 tokens: {bar_ms:g} ms"
        print(f"hash {num_tokens} tokens, {algorithm:12} {elapsed_ms:8.2f} ms{note}{'' if met else '   MISSED'}")
    return fine


def measure_decode(repeats: int) -> None:
    """Print the cost of `allocate` and `cache_blocks` for running decodes that need no new block."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    manager = KVCacheManager(plan_kv_cache({"layers.0": spec}, num_blocks=40 * NUM_DECODES), KVCacheConfig())
    requests = [make_request(str(i), [*range(i, i + 500)]) for i in range(NUM_DECODES)]
    for request in requests:
        manager.allocate(request, 500)
        request.num_computed_tokens = 500
        manager.cache_blocks(request, 500)

    def allocate_all() -> None:
        for request in requests:
            manager.allocate(request, 1)

    def cache_all() -> None:
        for request in requests:
            manager.cache_blocks(request, 500)

    for name, call in (("allocate", allocate_all), ("cache_blocks", cache_all)):
        elapsed_s = median_s(call, 20 * repeats)
        print(
            f"{name} for {NUM_DECODES} decodes: {1e6 * elapsed_s:.0f} us ({1e9 * elapsed_s / NUM_DECODES:.0f} ns each)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="fail when a bar is missed")
    arguments = parser.parse_args()
    fine = measure_hashing(arguments.num_tokens, arguments.repeats)
    measure_decode(arguments.repeats)
    return 1 if arguments.check and not fine else 0


if __name__ == "__main__":
    sys.exit(main())
