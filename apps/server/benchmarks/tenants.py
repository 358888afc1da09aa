"""How far a tenant with ten times the load delays another one, against running alone.

    python apps/server/benchmarks/tenants.py [--requests 60] [--rounds 3] [--factor 10] [--max-num-seqs 16]

A server of the demo model has the keys of two tenants. The small one keeps `--clients` requests running, one after the
other each; the large one ten times as many, with the same prompts and lengths. The small one is measured alone and
beside the large one, in turns. Prints the median and the 99th percentile of its time to first token, its time per
token and its time for a request, of both, their ratios, and the large one's requests a second.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import httpx

CHAT = "/v1/chat/completions"
KEYS = {"small": "key-of-small", "large": "key-of-large"}


class Times(NamedTuple):
    """Seconds of one request."""

    first_token_s: float
    per_token_s: float
    whole_s: float


def ask(http: httpx.Client, tenant: str, choose: random.Random, max_tokens: int) -> Times:
    words = " ".join(choose.choice(("red", "green", "blue", "seven", "eleven")) for _ in range(60))
    body = {
        "messages": [{"role": "user", "content": f"{choose.random()} {words}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    start_s = time.perf_counter()
    first_s = None
    with http.stream("POST", CHAT, json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = time.perf_counter()
    assert first_s is not None
    end_s = time.perf_counter()
    return Times(first_s - start_s, (end_s - first_s) / (max_tokens - 1), end_s - start_s)


class Load:
    """Clients of one tenant, each with one request at a time."""

    def __init__(self, url: str, tenant: str, num_clients: int, max_tokens: int) -> None:
        self.times: list[Times] = []
        self._is_over = threading.Event()
        arguments = (url, tenant, max_tokens)
        self._threads = [threading.Thread(target=self._run, args=(*arguments, number)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, tenant: str, max_tokens: int, number: int) -> None:
        choose = random.Random(f"{tenant} {number} {time.monotonic_ns()}")
        with httpx.Client(base_url=url, timeout=300) as http:
            while not self._is_over.is_set():
                self.times.append(ask(http, tenant, choose, max_tokens))

    def wait(self, count: int) -> None:
        while len(self.times) < count and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.02)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=60, help="of the small tenant in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="of the small tenant")
    parser.add_argument("--factor", type=int, default=10, help="so many times as many clients has the large one")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--flag", action="append", default=[], help="of quire serve, e.g. --flag=--no-prefix-caching")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.yaml"
        keys.write_text("".join(f"{tenant}: {key}\n" for tenant, key in KEYS.items()))
        keys.chmod(0o600)
        log = Path(name) / "serve.log"
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none"]
        command += ["--api-key-file", str(keys), "--max-num-seqs", str(args.max_num_seqs), "--num-threads", "1"]
        command += ["--shutdown-timeout-s", "5", *args.flag]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            measure(found[1], args)
        finally:
            server.terminate()
            server.wait()


def measure(url: str, args: argparse.Namespace) -> None:
    times: dict[str, list[Times]] = {"alone": [], "beside": []}
    num_large, seconds = 0, 0.0
    warm = Load(url, "small", args.clients, args.max_tokens)
    warm.wait(10)
    warm.stop()
    for _ in range(args.rounds):
        for kind, own in times.items():
            large = None
            if kind == "beside":
                large = Load(url, "large", args.clients * args.factor, args.max_tokens)
                large.wait(args.max_num_seqs)  # the queue is full
            start_s, before = time.perf_counter(), 0 if large is None else len(large.times)
            small = Load(url, "small", args.clients, args.max_tokens)
            small.wait(args.requests)
            small.stop()
            own += small.times
            if large is not None:
                num_large += len(large.times) - before
                seconds += time.perf_counter() - start_s
                large.stop()
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for kind, measured in times.items():
        for field in Times._fields:
            values = sorted(getattr(each, field) for each in measured)
            figures.setdefault(field, {})[kind] = statistics.median(values), values[int(len(values) * 0.99)]
    for field, of in figures.items():
        (alone, alone_99), (beside, beside_99) = of["alone"], of["beside"]
        print(
            f"{field:14} alone {alone * 1000:7.1f} ms, p99 {alone_99 * 1000:7.1f}; beside {beside * 1000:7.1f} ms, p99 "
            f"{beside_99 * 1000:7.1f}; ratio {beside / alone:.2f}, p99 {beside_99 / alone_99:.2f}"
        )
    print(json.dumps({"large_requests_per_s": round(num_large / seconds, 1)}))


if __name__ == "__main__":
    main()
