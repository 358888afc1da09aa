"""Requests per second at saturation: data parallel engines against one, each with one thread, on the demo model.

    python apps/bench/benchmarks/data_parallel_throughput.py --engines 2

Each configuration runs in turn with the others stopped, `--rounds` times. Beside the requests per second of the wall
clock stand those per second of processor time that all processes got: on a machine with other work, that ratio says
what the engines cost, and the first one what was left to them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from typing import NamedTuple

from quire import AsyncLLM, QuireConfig, SamplingParams
from quire_engine import EnginePool
from quire_interfaces import OutputKind, RequestOptions

NUM_PROMPT_TOKENS = 64
NUM_OUTPUT_TOKENS = 64
CONCURRENCY = 32
"""Requests in flight for each engine: as many as run at the same time."""


class Rate(NamedTuple):
    """Of one round."""

    per_second: float
    """Requests per second of the wall clock."""
    engine_cpu_s: float
    """Processor time of the engine processes per request, in seconds."""
    client_cpu_s: float
    """Processor time of this process per request, in seconds."""
    num_busy_cores: float
    """Processors that the engine processes got."""


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def random_prompts(llm: AsyncLLM, number: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    chance = random.Random(seed)
    vocab_size = llm.engine.info.vocab_size
    return [[chance.randrange(3, vocab_size) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(number)]


async def run_requests(llm: AsyncLLM, prompts: list[list[int]], concurrency: int) -> None:
    """A request for each prompt, so many of them at a time."""
    waiting = iter(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)

    async def work() -> None:
        for token_ids in waiting:
            prompt = {"prompt_token_ids": token_ids}
            async for _ in llm.generate(prompt, params, RequestOptions(output_kind=OutputKind.FINAL_ONLY)):
                pass

    await asyncio.gather(*(work() for _ in range(concurrency)))


async def measure(num_engines: int, num_requests: int, seed: int) -> Rate:
    """One round with so many engines."""
    config = QuireConfig.of(
        data_parallel_size=num_engines,
        num_threads=1,
        max_num_seqs=CONCURRENCY,
        max_model_len=512,
        num_gpu_blocks_override=2048,
        stream_interval=NUM_OUTPUT_TOKENS,
    )
    llm = AsyncLLM.start(config)
    await llm.ready()
    engines = list(llm.client.engines.values()) if isinstance(llm.client, EnginePool) else [llm.client]
    pids = [engine.pid for engine in engines if engine.pid is not None]
    concurrency = CONCURRENCY * num_engines
    await run_requests(llm, random_prompts(llm, concurrency, seed + 1), concurrency)
    prompts = random_prompts(llm, num_requests * num_engines, seed)
    start_s, own_s, engines_s = time.perf_counter(), time.process_time(), sum(map(cpu_seconds, pids))
    await run_requests(llm, prompts, concurrency)
    seconds = time.perf_counter() - start_s
    engine_cpu_s, client_cpu_s = sum(map(cpu_seconds, pids)) - engines_s, time.process_time() - own_s
    await llm.shutdown()
    count = num_requests * num_engines
    return Rate(count / seconds, engine_cpu_s / count, client_cpu_s / count, engine_cpu_s / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256, help="for each engine")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates: dict[int, list[Rate]] = {1: [], args.engines: []}
    for number in range(args.rounds):
        for num_engines, measured in rates.items():
            measured.append(asyncio.run(measure(num_engines, args.requests, number)))
            rate = measured[-1]
            print(
                f"{num_engines} engine(s): {rate.per_second:.1f} requests/s, per request "
                f"{1e3 * rate.engine_cpu_s:.2f} ms of the engines' processor time and {1e3 * rate.client_cpu_s:.2f} ms "
                f"of this process's, engines got {rate.num_busy_cores:.2f} processors",
                flush=True,
            )
    one, several = ([rate.per_second for rate in rates[size]] for size in (1, args.engines))
    cost_one, cost_several = (
        statistics.median(rate.engine_cpu_s for rate in rates[size]) for size in (1, args.engines)
    )
    print(f"requests/s, medians: {statistics.median(several) / statistics.median(one):.2f} times those of one engine")
    print(
        f"requests per second of the engines' processor time: {cost_one / cost_several:.2f} times those of one engine"
    )
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
