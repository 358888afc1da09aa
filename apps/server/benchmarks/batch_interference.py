"""What a running batch costs interactive requests: their time to first token beside it, against without it.

    python apps/server/benchmarks/batch_interference.py [--requests 200] [--prompt-words 120] [--rounds 3]

A server of the demo model answers streamed chat completions, one after the other with pauses between them, in turns
without a batch and beside one (which is cancelled after each turn). Prints the median and the 99th percentile of the
time to the first token of both, their ratio, and the lines a second that the batch got meanwhile.
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
import time
from pathlib import Path

import httpx

CHAT = "/v1/chat/completions"


def first_token_s(http: httpx.Client, choose: random.Random, num_words: int) -> float:
    words = " ".join(choose.choice(("red", "green", "blue", "seven", "eleven")) for _ in range(num_words))
    body = {"messages": [{"role": "user", "content": f"{choose.random()} {words}"}], "max_tokens": 8, "stream": True}
    start_s = time.perf_counter()
    with http.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                first_s = time.perf_counter() - start_s
                for _ in lines:
                    pass
                return first_s
    raise AssertionError("no token came")


def start_batch(http: httpx.Client, num_lines: int) -> str:
    body = {"messages": [{"role": "user", "content": "Count as far as you can."}], "max_tokens": 64, "ignore_eos": True}
    text = "".join(
        json.dumps({"custom_id": str(index), "method": "POST", "url": CHAT, "body": body}) + "\n"
        for index in range(num_lines)
    )
    file = http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()
    batch = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    name = http.post("/v1/batches", json=batch).json()["id"]
    while not http.get(f"/v1/batches/{name}").json()["request_counts"]["completed"]:
        time.sleep(0.05)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-words", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1, metavar="SECONDS", help="longest pause between requests")
    parser.add_argument(
        "--flag", action="append", default=[], help="of quire serve, e.g. --flag=--batch-busy-concurrency=0"
    )
    args = parser.parse_args()
    choose = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "serve.log"
        flags = [part for flag in args.flag for part in flag.split("=", 1)]
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none"]
        command += ["--num-threads", "1", "--files-dir", f"{name}/files", "--shutdown-timeout-s", "5", *flags]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            with httpx.Client(base_url=found[1], timeout=60) as http:
                measure(http, choose, args)
        finally:
            server.terminate()
            server.wait()


def measure(http: httpx.Client, choose: random.Random, args: argparse.Namespace) -> None:
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    num_lines = seconds = 0.0
    for _ in range(20):
        first_token_s(http, choose, args.prompt_words)
    for _ in range(args.rounds):
        for kind, own in times.items():
            name = start_batch(http, 20_000) if kind == "beside" else None
            start_s = time.perf_counter()
            before = 0 if name is None else http.get(f"/v1/batches/{name}").json()["request_counts"]["completed"]
            for _ in range(args.requests // args.rounds):
                own.append(first_token_s(http, choose, args.prompt_words))
                time.sleep(choose.random() * args.pause)
            if name is not None:
                seconds += time.perf_counter() - start_s
                num_lines += http.get(f"/v1/batches/{name}").json()["request_counts"]["completed"] - before
                http.post(f"/v1/batches/{name}/cancel")
                while http.get(f"/v1/batches/{name}").json()["status"] == "cancelling":
                    time.sleep(0.05)
    figures = {}
    for kind, own in times.items():
        own.sort()
        figures[kind] = statistics.median(own), own[int(len(own) * 0.99)]
        print(f"{kind:7} first token: median {figures[kind][0] * 1000:6.2f} ms, p99 {figures[kind][1] * 1000:6.2f} ms")
    ratios = [figures["beside"][place] / figures["alone"][place] for place in (0, 1)]
    print(
        f"ratio: median {ratios[0]:.3f}, p99 {ratios[1]:.3f}; the batch got {num_lines / seconds:.1f} lines/s meanwhile"
    )


if __name__ == "__main__":
    main()
