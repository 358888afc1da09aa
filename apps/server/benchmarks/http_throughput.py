"""What the HTTP side costs: requests per second of one API process against an engine without a model, and its memory.

    python apps/server/benchmarks/http_throughput.py --requests 3000 --output-tokens 8 --concurrency 64

Three processes: the API process under test on the first core, its fake engine and this load generator on the others.
Processor time is the API process's own, so "per core" figures hold on a busy machine too. Needs quire-testkit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from quire_testkit.checkpoints import make_checkpoint

LAUNCH = """
import os, sys, threading, time
from quire import QuireConfig
from quire_server.config import ServerConfig
from quire_server.serve import serve
from quire_testkit.fake_engine import FACTORY
folder, port, first, others = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), {int(c) for c in sys.argv[4].split(",")}
os.sched_setaffinity(0, others)  # inherited by the engine process
main = threading.get_native_id()
threading.Timer(1.0, lambda: os.sched_setaffinity(main, {first})).start()
engine = dict(num_blocks=4096, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=512,
              max_queued_requests=4096, check_kv=False, vocab_size=1024, num_token_ids=1000)
serve(QuireConfig.of(model=folder), ServerConfig(port=port, banner=False), factory=(FACTORY, engine))
"""


async def load(url: str, num_requests: int, output_tokens: int, concurrency: int, *, stream: bool) -> float:
    """Send everything over kept connections; the wall time."""
    body = {
        "messages": [{"role": "user", "content": "the quire gathers twelve blocks of paper"}],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    left = iter(range(num_requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    text = await response.read()
                    assert response.status == 200, text
                    if stream:
                        assert text.endswith(b"data: [DONE]\n\n")

        start = time.perf_counter()
        await asyncio.wait_for(asyncio.gather(*(worker() for _ in range(concurrency))), timeout=600)
        return time.perf_counter() - start


async def wait_healthy(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(1200):
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise SystemExit("the server did not start within a minute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--port", type=int, default=8191)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    first, others = cores[0], cores[1:] or cores
    os.sched_setaffinity(0, others)
    url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "model")
        command = [sys.executable, "-c", LAUNCH, str(folder), str(args.port), str(first), ",".join(map(str, others))]
        server = subprocess.Popen(command)
        try:
            asyncio.run(wait_healthy(url))
            process, figures = psutil.Process(server.pid), {}
            asyncio.run(load(url, 200, args.output_tokens, args.concurrency, stream=True))
            for name, stream in (("whole", False), ("streaming", True)):
                before = process.cpu_times()
                wall = asyncio.run(load(url, args.requests, args.output_tokens, args.concurrency, stream=stream))
                after = process.cpu_times()
                cpu = after.user + after.system - before.user - before.system
                figures[f"{name}_requests_per_s"] = args.requests / wall
                figures[f"{name}_requests_per_core_s"] = args.requests / cpu
            figures["api_process_rss_mb"] = process.memory_info().rss / 1e6
            print(json.dumps({name: round(value, 1) for name, value in figures.items()}, indent=2))
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
