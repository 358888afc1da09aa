"""Whether a server that runs for long keeps its memory and its blocks: a mixed load on the demo model.

    python apps/server/benchmarks/soak.py [--minutes 30] [--clients 8] [--pause 0.2]

Serves the demo model with a cache so small that requests are preempted, and sends it whole and streamed chat, several
answers at once, log probabilities, JSON schemas, tools, long prompts, refused requests, and clients that leave in the
middle. Every ten seconds it reads the anonymous memory of the server's processes: what they have written, and not the
files that they share with others. The cache of encoded text is so small that it is full before half of the time is
over: what still grows then is not a cache. In the end, when nobody is being served, it prints the slope of memory over
the second half of the time with its standard error, and whether the cache is empty again. The exit status is 1 if a
request failed that should not have, or a block is still held.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def chat(random_: random.Random, **fields: Any) -> dict[str, Any]:
    question = f"What is {random_.randrange(100)} + {random_.randrange(100)}?"
    return {"messages": [{"role": "user", "content": question}], "max_tokens": random_.randrange(1, 120), **fields}


REQUESTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "whole": lambda r: chat(r, temperature=r.choice([0, 1])),
    "several answers": lambda r: chat(r, n=3, temperature=1.0, seed=r.randrange(1 << 30)),
    "log probabilities": lambda r: chat(r, logprobs=True, top_logprobs=5),
    "schema": lambda r: chat(
        r, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    ),
    "tools": lambda r: chat(r, tools=[TOOL], tool_choice=r.choice(["auto", "required"])),
    "long": lambda r: {"messages": [{"role": "user", "content": "word " * r.randrange(100, 600)}], "max_tokens": 20},
    "long answer": lambda r: chat(r) | {"max_tokens": r.randrange(300, 900), "ignore_eos": True, "temperature": 1.0},
    "refused": lambda r: chat(r, top_p=7.0),
}


def send(url: str, random_: random.Random, outcomes: Counter[str]) -> None:
    """One request of a random kind; streamed or whole, sometimes left in the middle."""
    kind = random_.choice(list(REQUESTS))
    body = REQUESTS[kind](random_)
    if random_.random() < 0.5 and kind != "refused":
        left = random_.random() < 0.3
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120) as answer:
            last = ""
            for number, line in enumerate(answer.iter_lines()):
                last = line or last
                if left and number > 6:
                    break
        good = answer.status_code == 200 and (left or last == "data: [DONE]")
    else:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        good, last = answer.status_code == (400 if kind == "refused" else 200), answer.text
    outcomes[kind if good else f"failed: {kind}: {answer.status_code} {last[-300:]}"] += 1


def memory_bytes(pid: int) -> int:
    """Anonymous memory of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = re.search(r"^Anonymous:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024 + sum(memory_bytes(int(child)) for child in children)


def slope(points: list[tuple[float, int]]) -> tuple[float, float]:
    """Least squares through (seconds, bytes): bytes per second, and the standard error of it."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return rise, (rest / (n - 2) / spread) ** 0.5


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"quire:{name}[{{ ]", line))


def run(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load the server for the time asked for."""
    outcomes, stopping = Counter[str](), threading.Event()

    def client(seed: int) -> None:
        random_ = random.Random(seed)
        while not stopping.wait(random_.random() * 2 * options.pause):
            try:
                send(url, random_, outcomes)
            except httpx.HTTPError as error:
                outcomes[f"failed: {type(error).__name__}"] += 1

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(options.clients)]
    for each in clients:
        each.start()
    start_s, points = time.monotonic(), list[tuple[float, int]]()
    while (now_s := time.monotonic() - start_s) < options.minutes * 60:
        points.append((now_s, memory_bytes(pid)))
        print(
            f"\r{now_s:6.0f} s  {points[-1][1] / 1e6:7.1f} MB  {sum(outcomes.values())} requests",
            end="",
            file=sys.stderr,
        )
        time.sleep(min(10.0, options.minutes * 60 / 20))
    stopping.set()
    for each in clients:
        each.join()
    print(file=sys.stderr)
    idle_by_s = time.monotonic() + 30
    while gauge(url, "num_requests_running") + gauge(url, "num_requests_waiting") and time.monotonic() < idle_by_s:
        time.sleep(0.2)
    rise, error = slope(points[len(points) // 2 :])
    return {
        "requests": dict(sorted(outcomes.items())),
        "preemptions": gauge(url, "num_preemptions_total"),
        "cache_in_use_at_the_end": gauge(url, "kv_cache_usage"),
        "memory_mb": [round(points[0][1] / 1e6, 1), round(points[-1][1] / 1e6, 1)],
        "slope_kb_per_minute": round(rise * 60 / 1e3, 2),
        "standard_error": round(error * 60 / 1e3, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between a client's requests, on average")
    parser.add_argument(
        "--num-blocks", type=int, default=140, help="blocks of 16 tokens in the cache; one request may take 128"
    )
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--num-threads", "1"]
    command += ["--num-gpu-blocks-override", str(options.num_blocks), "--segment-cache-bytes", "200000"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = next(found for line in server.stdout if (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", line)))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        report = run(address.group(1), server.pid, options)
    finally:
        server.terminate()
        server.wait(60)
    print(json.dumps(report, indent=2))
    failed = any(kind.startswith("failed") for kind in report["requests"])
    return int(failed or report["cache_in_use_at_the_end"] > 0 or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
