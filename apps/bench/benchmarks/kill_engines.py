"""Kill engine processes at random while requests stream, and compare every stream with that of an undisturbed engine.

    python apps/bench/benchmarks/kill_engines.py --kills 200 --engines 2

Streams are of six kinds: greedy, seeded, by a pattern, with log probabilities, several answers, and with penalties.
Ends with status 1 when a stream differs, is lost or hangs, or when a process is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from quire import AsyncLLM, QuireConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from quire_engine import EnginePool
from quire_interfaces import OutputKind, RequestOptions

PATTERN = StructuredOutputsParams(regex="([a-z]{2,9} ){60}")
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Once upon a time", {"temperature": 0.0}),
    ("The sea was", {"temperature": 0.9, "top_p": 0.9, "seed": 5}),
    ("Some words:", {"structured_outputs": PATTERN, "seed": 3}),
    ("Numbers are", {"temperature": 0.7, "seed": 8, "logprobs": 2, "prompt_logprobs": 1}),
    ("Three ways", {"temperature": 1.0, "seed": 11, "n": 3}),
    ("A penalty", {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "min_p": 0.05}),
)
NUM_STREAMS = 8
"""Streams that run at the same time."""
HANG_S = 120.0
"""A stream without an output for this long hangs, unless an engine was killed meanwhile: on a loaded machine a start
and the compiling of a grammar take a good part of it."""


class Tally:
    """What came of the streams."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_tokens = 0
        self.longest_gap_s = 0.0
        self.wrong: list[str] = []
        self.limits: set[asyncio.Timeout] = set()
        """Of the streams that run."""

    def extend(self, limit: asyncio.Timeout) -> None:
        """Give a stream its time anew."""
        limit.reschedule(asyncio.get_running_loop().time() + HANG_S)


async def stream(llm: AsyncLLM, kind: int, tally: Tally) -> list[Any]:
    """What a caller puts together from the deltas of one request: tokens, text, log probabilities and ends."""
    prompt, fields = KINDS[kind]
    params = SamplingParams(max_tokens=400, ignore_eos="structured_outputs" not in fields, **fields)
    parts: dict[int, list[Any]] = {}
    prompt_logprobs: Any = None
    outputs = llm.generate(prompt, params, RequestOptions(output_kind=OutputKind.DELTA))
    last_s = time.monotonic()
    async with asyncio.timeout(HANG_S) as limit:
        tally.limits.add(limit)
        async for output in outputs:
            tally.extend(limit)
            now_s = time.monotonic()
            tally.longest_gap_s, last_s = max(tally.longest_gap_s, now_s - last_s), now_s
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
            _add(parts, output, tally)
        tally.limits.discard(limit)
    return [prompt_logprobs, *(parts[index] for index in sorted(parts))]


def _add(parts: dict[int, list[Any]], output: RequestOutput, tally: Tally) -> None:
    for each in output.outputs:
        part = parts.setdefault(each.index, [[], "", [], None])
        part[0] += each.token_ids
        part[1] += each.text
        part[2] += each.logprobs or []
        part[3] = each.finish_reason or part[3]
        tally.num_tokens += len(each.token_ids)


async def keep_streaming(
    llm: AsyncLLM, expected: Sequence[list[Any]], kinds: itertools.count[int], done: asyncio.Event, tally: Tally
) -> None:
    """One stream after the other until there are no more kills; the last ones end by themselves."""
    while not done.is_set():
        kind = next(kinds) % len(KINDS)
        try:
            result = await stream(llm, kind, tally)
        except Exception as error:
            tally.limits = {limit for limit in tally.limits if not limit.expired()}
            tally.wrong.append(f"{KINDS[kind][0]!r} failed: {type(error).__name__}: {error}")
            continue
        tally.num_streams += 1
        if result != expected[kind]:
            pairs = zip(result, expected[kind], strict=False)
            places = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
            ends = [each[3] for each in result[1:]]
            tally.wrong.append(f"{KINDS[kind][0]!r} differs in parts {places}; ends: {ends}")


async def kill_engines(pool: EnginePool, num_kills: int, chance: random.Random, pids: set[int], tally: Tally) -> None:
    """SIGKILL to an engine process, each a moment of chance after tokens have come again; also to those that start."""
    for _ in range(num_kills):
        num_tokens = tally.num_tokens
        while tally.num_tokens == num_tokens:
            await asyncio.sleep(0.005)
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        pid = None
        while pid is None or not _is_running(pid):
            await asyncio.sleep(0.01)
            pid = chance.choice(list(pool.engines.values())).pid
        pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        for limit in tally.limits:
            if not limit.expired():
                tally.extend(limit)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def measure(num_kills: int, num_engines: int, seed: int) -> int:
    """Run everything; the exit status."""
    settings: dict[str, Any] = {
        "num_threads": 1,
        "num_gpu_blocks_override": 1024,
        "max_model_len": 512,
        "structured_output_timeout": 300.0,
        "forward_output": False,
    }
    alone = AsyncLLM.start(QuireConfig.of(**settings))
    if not (await alone.ready()).batch_invariant:
        await alone.shutdown()
        raise SystemExit("equal tokens are promised with compiled CPU kernels only: `quire ops` says what is missing")
    expected = [await stream(alone, kind, Tally()) for kind in range(len(KINDS))]
    await alone.shutdown()

    llm = AsyncLLM.start(QuireConfig.of(data_parallel_size=num_engines, max_restarts=num_kills + 10, **settings))
    await llm.ready()
    pool = llm.client
    assert isinstance(pool, EnginePool)
    pids: set[int] = set()
    tally, done, kinds = Tally(), asyncio.Event(), itertools.count()
    workers = [asyncio.create_task(keep_streaming(llm, expected, kinds, done, tally)) for _ in range(NUM_STREAMS)]
    start_s = time.monotonic()
    await kill_engines(pool, num_kills, random.Random(seed), pids, tally)
    done.set()
    await asyncio.gather(*workers)
    seconds = time.monotonic() - start_s
    pids |= {engine.pid for engine in pool.engines.values() if engine.pid is not None}
    num_restarts = pool.num_restarts
    await llm.shutdown()
    orphans = [pid for pid in pids if _is_running(pid)]
    print(
        f"{num_kills} kills in {seconds:.0f} s, {num_restarts} restarts, {tally.num_streams} streams with "
        f"{tally.num_tokens} tokens, longest wait for a token {tally.longest_gap_s:.1f} s; {len(tally.wrong)} wrong, "
        f"{len(orphans)} processes left behind"
    )
    for each in tally.wrong[:20]:
        print(each)
    return int(bool(tally.wrong or orphans or tally.num_streams < NUM_STREAMS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return asyncio.run(measure(args.kills, args.engines, args.seed))


if __name__ == "__main__":
    raise SystemExit(main())
