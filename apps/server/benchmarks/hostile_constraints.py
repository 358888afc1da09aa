"""What expensive constraints of some clients cost the token streams of others.

    python apps/server/benchmarks/hostile_constraints.py [--rounds 3] [--streams 4]

Serves the demo model. First says how much processor time the API process and the engine's process take per hostile
request of each kind, which does not depend on what else the machine does. Then measures the time between events of
plain streams, in turn without and with another client that sends schemas and patterns that are expensive to compile or
to refuse, each time with new content; the median of the rounds counts. The attacker runs at low priority, as a stand-in
for a client elsewhere. Wants a quiet machine: constraints are compiled at low priority, but not for nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import httpx

WORDS = [f"word{number * 7919}" for number in range(14_000)]
HOSTILE: list[dict[str, Any]] = [
    {"regex": "|".join(WORDS)},
    {"regex": "(.*a){30}.{50}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"json": {"enum": WORDS}},
    {"json": {"anyOf": [{"properties": {f"k{i}_{j}": {} for j in range(9)}, "type": "object"} for i in range(900)]}},
    {"json": {"const": "x" * 500_000}},
    {"json": {"const": "x" * 200_000}},
    {"json": {"enum": ["x" * 3_000_000]}},
    {"json": {"enum": ["y" * 1000] * 10_000}},
    {"json": {"enum": [{}] * 1_000_000}},
    {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"regex": "(" * 100_000 + ")" * 100_000},
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


def measure(url: str, num_streams: int, name: str) -> float:
    """Run some streams at once and print how evenly they came. The 99th percentile in ms."""
    gaps_s: list[float] = []
    with ThreadPoolExecutor(num_streams) as pool:
        list(pool.map(lambda _: stream(url, gaps_s, 700), range(num_streams)))
    gaps_s.sort()
    shares = {f"p{share * 100:g}": gaps_s[int(share * (len(gaps_s) - 1))] * 1e3 for share in (0.5, 0.9, 0.99, 1.0)}
    print(f"{name:<10}" + "".join(f"{key:>6} {value:7.2f} ms" for key, value in shares.items()), flush=True)
    return shares["p99"]


def bodies(kinds: list[dict[str, Any]] = HOSTILE) -> Iterator[bytes]:
    """Requests with hostile constraints, none of them twice."""
    for number, constraint in zip(itertools.count(), itertools.cycle(kinds), strict=False):
        wanted = dict(constraint)
        if "regex" in wanted:
            wanted["regex"] += f"|z{number}"
        elif isinstance(wanted["json"], str):
            wanted["json"] += " " * number
        else:
            wanted["json"] = {**wanted["json"], "title": str(number)}
        yield json.dumps({"prompt": "x", "max_tokens": 5, "structured_outputs": wanted}).encode()


def attack(url: str, stopping: Event, answers: Queue[int]) -> None:
    """Send hostile requests, one after another. In a process of its own, with bodies made before: what they cost their
    sender is not the server's doing."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    prepared = list(itertools.islice(bodies(), 150))
    answers.put(0)
    for body in prepared:
        if stopping.is_set():
            return
        answers.put(httpx.post(f"{url}/v1/completions", content=body, timeout=120).status_code)


def threads_ms(process_id: int) -> float:
    """Processor time of a process's threads so far (Linux)."""
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def processor_time(url: str, api_id: int, num_requests: int = 5) -> None:
    """Print what hostile requests of each kind cost the processes that others wait for."""
    ids = {api_id: "API"}
    for child in children(api_id):
        if not any(name in Path(f"/proc/{child}/cmdline").read_bytes() for name in (b"large_bodies", b"tracker")):
            ids[child] = "engine"
    for kind in HOSTILE:
        prepared = list(itertools.islice(bodies([kind]), num_requests))
        before = {each: threads_ms(each) for each in ids}
        statuses = {httpx.post(f"{url}/v1/completions", content=body, timeout=120).status_code for body in prepared}
        spent = ", ".join(f"{ids[each]} {(threads_ms(each) - before[each]) / num_requests:6.1f} ms" for each in ids)
        print(f"{str(kind)[:40]:<42}{len(prepared[0]):>9} bytes, status {statuses}: {spent}", flush=True)


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
        httpx.post(f"{url}/v1/completions", content=next(bodies([{"regex": "a"}])), timeout=120)
        processor_time(url, server.pid)
        quiet_ms, attacked_ms = [], []
        for _ in range(options.rounds):
            quiet_ms.append(measure(url, options.streams, "quiet"))
            stopping, answers = processes.Event(), processes.Queue()
            attacker = processes.Process(target=attack, args=(url, stopping, answers))
            attacker.start()
            answers.get(timeout=60)  # it is ready
            attacked_ms.append(measure(url, options.streams, "attacked"))
            stopping.set()
            statuses = []
            while attacker.is_alive() or not answers.empty():
                with contextlib.suppress(queue.Empty):
                    statuses.append(answers.get(timeout=0.2))
            print(f"  {len(statuses)} hostile requests, {statuses.count(400)} of them refused")
        quiet, attacked = median(quiet_ms), median(attacked_ms)
        print(f"median p99: {quiet:.2f} ms quiet, {attacked:.2f} ms attacked: {100 * (attacked / quiet - 1):+.0f} %")
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
