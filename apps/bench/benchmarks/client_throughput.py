"""What the client side of the engine costs: requests per second, and microseconds per token, against a fake engine.

    python apps/bench/benchmarks/client_throughput.py --requests 3000 --output-tokens 8 --concurrency 128

The engine runs in a child process without a model, so nearly all that is measured is the client: making requests,
sending them, one receive and one decode per step, the fan-out to streams, and the output processing (without text).
Processor time is this process's own, so other load on the machine matters little to it. Needs quire-testkit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time

from quire_engine import AsyncEngine, EngineConfig, ProcessClient
from quire_interfaces import SamplingParams
from quire_testkit.fake_engine import FACTORY


async def measure(num_requests: int, prompt_tokens: int, output_tokens: int, concurrency: int) -> dict[str, float]:
    """Run the load; returns the figures."""
    engine = {
        "num_blocks": 4096,
        "max_num_seqs": concurrency,
        "max_num_batched_tokens": 8192,
        "max_model_len": prompt_tokens + output_tokens,
        "max_queued_requests": num_requests,
        "check_kv": False,
    }
    client = ProcessClient(FACTORY, engine, EngineConfig(max_requests_in_flight=num_requests))
    await client.ready()
    front = AsyncEngine(client)
    left = iter(range(num_requests))
    num_tokens = 0

    async def worker() -> None:
        nonlocal num_tokens
        for i in left:
            prompt = [(i * 31 + j) % 1000 for j in range(prompt_tokens)]
            async for output in front.generate(prompt, SamplingParams(max_tokens=output_tokens, seed=i)):
                for completion in output.outputs:
                    num_tokens += len(completion.token_ids)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await client.shutdown()
    assert num_tokens == num_requests * output_tokens
    return {
        "requests_per_s": num_requests / wall,
        "tokens_per_s": num_tokens / wall,
        "client_cpu_us_per_request": cpu / num_requests * 1e6,
        "client_cpu_us_per_token": cpu / num_tokens * 1e6,
        "client_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=128)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.requests, options.prompt_tokens, options.output_tokens, options.concurrency))
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
