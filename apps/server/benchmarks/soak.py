"""Whether a server that runs for long keeps its memory and its blocks: a mixed load on the demo model.

    python apps/server/benchmarks/soak.py [--minutes 30] [--clients 8] [--pause 0.2]

Serves the demo model with a cache so small that requests are preempted, and sends it whole and streamed chat, several
answers at once, log probabilities, JSON schemas, tools, long prompts, refused requests, and clients that leave in the
middle. Every ten seconds it reads the anonymous memory of the server's processes: what they have written, and not the
files that they share with others. Twenty times the clients wait until nobody is being served, and each process tells
what it has in use (see `memory_in_use/`): objects of Python and bytes of malloc. These show a leak at once, which
anonymous memory does only when the holes in the heap are filled. The cache of encoded text is so small that it is full
before half of the time is over: what still grows then is not a cache. In the end it prints the slopes over the second
half of the time, each with its standard error, and whether the cache is empty again. The exit status is 1 if a request
failed that should not have, or a block is still held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

NUM_PAUSES = 20
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


def processes(pid: int) -> list[int]:
    """A process, its children and theirs; without those that end meanwhile."""
    found = [pid]
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").glob("*/children"):  # each thread's own
            found += [one for child in each.read_text().split() for one in processes(int(child))]
    return found


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, 0 when it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Anonymous:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found.group(1)) * 1024 if found else 0
    return 0


def in_use(pid: int, folder: Path) -> tuple[int, int]:
    """What a process has in use now: objects of Python, bytes of malloc."""
    told = folder / str(pid)
    number = int(told.read_text().split()[0])
    os.kill(pid, signal.SIGUSR1)
    deadline_s = time.monotonic() + 30
    while (answer := told.read_text().split())[0] == str(number):
        assert time.monotonic() < deadline_s, f"process {pid} does not tell what it has in use"
        time.sleep(0.05)
    return int(answer[1]), int(answer[2])


def name_of(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text()
    if "quire_engine" in command:
        return "engine"
    return "trials" if "trial_process" in command else "api"


def slope(points: list[tuple[float, int]]) -> tuple[float, float]:
    """Least squares through (seconds, bytes): bytes per second, and the standard error of it."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return rise, (rest / (n - 2) / spread) ** 0.5


def per_minute(points: list[tuple[float, int]], unit: float) -> list[float]:
    """Slope over the second half of the time and its standard error, in a unit per minute; nothing of two points."""
    half = points[len(points) // 2 :]
    if len(half) < 3:
        return []
    rise, error = slope(half)
    return [round(rise * 60 / unit, 2), round(error * 60 / unit, 2)]


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"quire:{name}[{{ ]", line))


class Clients:
    """Threads that send requests, one after another, until they are stopped."""

    def __init__(self, url: str, options: argparse.Namespace, outcomes: Counter[str]) -> None:
        self._url = url
        self._options = options
        self._outcomes = outcomes
        self._stopping = threading.Event()
        self._randoms = [random.Random(seed) for seed in range(options.clients)]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin, or go on."""
        self._stopping.clear()
        self._threads = [threading.Thread(target=self._work, args=(each,)) for each in self._randoms]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return when nobody is being served, or after 30 s."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        idle_by_s = time.monotonic() + 30
        while self._num_requests() and time.monotonic() < idle_by_s:
            time.sleep(0.2)

    def _work(self, random_: random.Random) -> None:
        while not self._stopping.wait(random_.random() * 2 * self._options.pause):
            try:
                send(self._url, random_, self._outcomes)
            except httpx.HTTPError as error:
                self._outcomes[f"failed: {type(error).__name__}"] += 1

    def _num_requests(self) -> float:
        return gauge(self._url, "num_requests_running") + gauge(self._url, "num_requests_waiting")


def run(url: str, pid: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load the server for the time asked for."""
    outcomes, duration_s = Counter[str](), options.minutes * 60
    clients = Clients(url, options, outcomes)
    clients.start()
    start_s, anonymous = time.monotonic(), list[tuple[float, int]]()
    objects, bytes_ = defaultdict[str, list[tuple[float, int]]](list), defaultdict[str, list[tuple[float, int]]](list)
    num_pauses = 0
    while (now_s := time.monotonic() - start_s) < duration_s:
        anonymous.append((now_s, sum(map(anonymous_bytes, processes(pid)))))
        progress = f"{now_s:6.0f} s  {anonymous[-1][1] / 1e6:7.1f} MB  {sum(outcomes.values())} requests"
        print(f"\r{progress}", end="", file=sys.stderr)
        time.sleep(min(10.0, duration_s / 20))
        if now_s > (num_pauses + 1) * duration_s / NUM_PAUSES:
            num_pauses += 1
            clients.stop()
            for each in processes(pid):
                if (folder / str(each)).exists():  # not in the short life of a trial
                    now_s = time.monotonic() - start_s
                    num_objects, num_bytes = in_use(each, folder)
                    objects[name_of(each)].append((now_s, num_objects))
                    bytes_[name_of(each)].append((now_s, num_bytes))
            clients.start()
    clients.stop()
    print(file=sys.stderr)
    return {
        "requests": dict(sorted(outcomes.items())),
        "preemptions": gauge(url, "num_preemptions_total"),
        "cache_in_use_at_the_end": gauge(url, "kv_cache_usage"),
        "anonymous_mb": [round(anonymous[0][1] / 1e6, 1), round(anonymous[-1][1] / 1e6, 1)],
        "anonymous_kb_per_minute": per_minute(anonymous, 1e3),
        "python_objects_per_minute": {name: per_minute(points, 1) for name, points in objects.items()},
        "malloc_kb_per_minute": {name: per_minute(points, 1e3) for name, points in bytes_.items()},
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
    folder = Path(tempfile.mkdtemp())
    paths = [str(Path(__file__).parent / "memory_in_use"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MEMORY_IN_USE_FOLDER": str(folder)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        address = next(found for line in server.stdout if (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", line)))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        report = run(address.group(1), server.pid, folder, options)
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(folder)
    print(json.dumps(report, indent=2))
    failed = any(kind.startswith("failed") for kind in report["requests"])
    return int(failed or report["cache_in_use_at_the_end"] > 0 or server.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
