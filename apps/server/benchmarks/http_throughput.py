"""What the HTTP side costs: requests per second of one API process against an engine without a model, and its memory.

    python apps/server/benchmarks/http_throughput.py --requests 3000 --output-tokens 8 --concurrency 64
    python apps/server/benchmarks/http_throughput.py --compare tenants+traces --requests 300 [--rounds 12]

Three processes: the API process under test on the first core, its fake engine and this load generator on the others.
Processor time is the API process's own, so "per core" figures hold on a busy machine too. With --compare, a second
server has keys of two tenants with limits, traces its requests to a collector (extra `otel`; the SDK's environment
variables hold), or both; the two servers are loaded in turns, and the ratio of their requests per core is printed.
Needs quire-testkit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from quire_testkit.checkpoints import make_checkpoint

LAUNCH = """
import json, os, sys, threading, time
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
settings = {"port": port, "banner": False, **json.loads(sys.argv[5])}
serve(QuireConfig.of(model=folder), ServerConfig(**settings), factory=(FACTORY, engine))
"""


KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
LIMITS = "requests_per_minute: 100000000, tokens_per_minute: 1000000000, tokens_per_day: 100000000000"


async def load(
    url: str, num_requests: int, output_tokens: int, concurrency: int, *, stream: bool, keys: Sequence[str] = ()
) -> float:
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
            for number in left:
                headers = {"authorization": f"Bearer {keys[number % len(keys)]}"} if keys else {}
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
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
    parser.add_argument("--compare", choices=("tenants", "traces", "tenants+traces"), help="with a server with these")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each server, with --compare")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    first, others = cores[0], cores[1:] or cores
    os.sched_setaffinity(0, others)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "model")

        def start(port: int, **settings: Any) -> subprocess.Popen[bytes]:
            where = [str(folder), str(port), str(first), ",".join(map(str, others))]
            settings = {"response_store": f"{scratch}/{port}/responses.sqlite", **settings}
            return subprocess.Popen([sys.executable, "-c", LAUNCH, *where, json.dumps(settings)])

        if args.compare:
            compare(args, start, Path(scratch))
            return
        url = f"http://127.0.0.1:{args.port}"
        server = start(args.port)
        try:
            asyncio.run(wait_healthy(url))
            process, figures = psutil.Process(server.pid), {}
            asyncio.run(load(url, 200, args.output_tokens, args.concurrency, stream=True))
            for name, stream in (("whole", False), ("streaming", True)):
                wall, cpu = asyncio.run(measure(process, url, args, stream=stream))
                figures[f"{name}_requests_per_s"] = args.requests / wall
                figures[f"{name}_requests_per_core_s"] = args.requests / cpu
            figures["api_process_rss_mb"] = process.memory_info().rss / 1e6
            print(json.dumps({name: round(value, 1) for name, value in figures.items()}, indent=2))
        finally:
            server.terminate()
            server.wait(30)


async def measure(
    process: psutil.Process, url: str, args: argparse.Namespace, *, stream: bool, keys: Sequence[str] = ()
) -> tuple[float, float]:
    """Wall time of a load, and processor time of the server."""
    before = process.cpu_times()
    wall = await load(url, args.requests, args.output_tokens, args.concurrency, stream=stream, keys=keys)
    after = process.cpu_times()
    return wall, after.user + after.system - before.user - before.system


def compare(args: argparse.Namespace, start: Callable[..., subprocess.Popen[bytes]], scratch: Path) -> None:
    """Load both servers in turns."""
    file = scratch / "keys.yaml"
    file.write_text("".join(f"{name}: {{key: {key}, {LIMITS}}}\n" for name, key in KEYS.items()))
    file.chmod(0o600)
    parts = {
        "tenants": {"api_key_file": str(file)},
        "traces": {"otlp_traces_endpoint": f"http://127.0.0.1:{args.port + 2}"},
    }
    chosen = [parts[name] for name in args.compare.split("+")]
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        args.compare: {k: v for each in chosen for k, v in each.items()},
    }
    urls = {name: f"http://127.0.0.1:{args.port + place}" for place, name in enumerate(settings)}
    servers = {name: start(args.port + place, **settings[name]) for place, name in enumerate(settings)}
    try:
        asyncio.run(alternate(args, urls, servers))
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(30)


async def alternate(
    args: argparse.Namespace, urls: dict[str, str], servers: dict[str, subprocess.Popen[bytes]]
) -> None:
    num_bodies = 0

    async def take(request: web.Request) -> web.Response:
        nonlocal num_bodies
        num_bodies += bool(await request.read())
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port + 2).start()
    for url in urls.values():
        await wait_healthy(url)
    rates: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    for number in range(args.rounds + 1):
        for stream in (False, True):
            for name, url in urls.items():
                keys = list(KEYS.values()) if "tenants" in name else []
                _, cpu = await measure(psutil.Process(servers[name].pid), url, args, stream=stream, keys=keys)
                if number:  # the first turn warms up
                    rates[stream].setdefault(name, []).append(args.requests / cpu)
    for stream, of in rates.items():
        plain, full = of.values()
        # Of turns beside each other: what else the machine does changes from minute to minute.
        ratio = statistics.median(b / a for a, b in zip(plain, full, strict=True))
        rate = statistics.median(plain)
        print(
            f"{'streaming' if stream else 'whole':9}  {rate:.0f} requests/core-s plain, {ratio:.1%} with {args.compare}"
        )
    print(f"the collector took {num_bodies} bodies")
    await runner.cleanup()


if __name__ == "__main__":
    main()
