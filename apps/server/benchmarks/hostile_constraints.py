"""What expensive constraints of some clients cost the token streams of others.

    python apps/server/benchmarks/hostile_constraints.py [--rounds 3] [--streams 4]

Serves the demo model, measures the time between events of plain streams, then again while another client sends schemas
and patterns that are expensive to compile or to refuse, each time with new content. Wants a quiet machine with a core
to spare: constraints are compiled at low priority, but not for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Queue
from multiprocessing.synchronize import Event
from typing import Any

import httpx

WORDS = [f"word{number * 7919}" for number in range(20_000)]
HOSTILE: list[dict[str, Any]] = [
    {"regex": "|".join(WORDS)},
    {"regex": "(.*a){30}.{50}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"json": {"enum": WORDS}},
    {"json": {"anyOf": [{"properties": {f"k{i}_{j}": {} for j in range(9)}, "type": "object"} for i in range(900)]}},
    {"json": {"const": "x" * 500_000}},
    {"json": {"enum": ["x" * 3_000_000]}},
]


def stream(url: str, gaps_s: list[float], num_tokens: int) -> None:
    """Read one stream; remember the time between its events."""
    body = {"prompt": "Tell me", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    last_s = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps_s.append(now_s - last_s)
                last_s = now_s


def measure(url: str, num_streams: int, name: str) -> None:
    """Run some streams at once and print how evenly they came."""
    gaps_s: list[float] = []
    with ThreadPoolExecutor(num_streams) as pool:
        list(pool.map(lambda _: stream(url, gaps_s, 700), range(num_streams)))
    gaps_s.sort()
    shares = {f"p{share * 100:g}": gaps_s[int(share * (len(gaps_s) - 1))] * 1e3 for share in (0.5, 0.9, 0.99, 1.0)}
    print(f"{name:<10}" + "".join(f"{key:>6} {value:7.2f} ms" for key, value in shares.items()), flush=True)


def bodies() -> Iterator[bytes]:
    """Requests with hostile constraints, none of them twice."""
    for number, constraint in zip(itertools.count(), itertools.cycle(HOSTILE), strict=False):
        wanted = dict(constraint)
        if "regex" in wanted:
            wanted["regex"] += f"|z{number}"
        else:
            wanted["json"] = {**wanted["json"], "title": str(number)}
        yield json.dumps({"prompt": "x", "max_tokens": 5, "structured_outputs": wanted}).encode()


def attack(url: str, stopping: Event, answers: Queue[int]) -> None:
    """Send hostile requests, one after another. In a process of its own, with bodies made before: what they cost their
    sender is not the server's doing."""
    prepared = list(itertools.islice(bodies(), 200))
    answers.put(0)
    for body in prepared:
        if stopping.is_set():
            return
        answers.put(httpx.post(f"{url}/v1/completions", content=body, timeout=120).status_code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--num-threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = next(found for line in server.stdout if (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", line)))
        url = address.group(1)
        measure(url, options.streams, "warm-up")
        for _ in range(options.rounds):
            measure(url, options.streams, "quiet")
            stopping, answers = processes.Event(), processes.Queue()
            attacker = processes.Process(target=attack, args=(url, stopping, answers))
            attacker.start()
            answers.get(timeout=60)  # it is ready
            measure(url, options.streams, "attacked")
            stopping.set()
            statuses = []
            while attacker.is_alive() or not answers.empty():
                with contextlib.suppress(queue.Empty):
                    statuses.append(answers.get(timeout=0.2))
            print(f"  {len(statuses)} hostile requests, {statuses.count(400)} of them refused")
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
