"""Each line of a batch answered once, though server and engine are killed again and again.

    python apps/server/benchmarks/batch_kills.py [--lines 10000] [--kills 50] [--concurrency 64] [--seed 0]

A server of the demo model runs a batch of chat completions. At random moments SIGKILL ends the server with its engine,
or the engine alone (which the server starts again); a killed server is started again on the same folder. At the end
every custom_id must stand once in the two result files, with a whole answer. Prints the number of kills, the lines that
were done at each, and how many lines ran more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

CHAT = "/v1/chat/completions"


class Server:
    """`quire serve` on a folder, started again after each kill."""

    def __init__(self, folder: Path, concurrency: int) -> None:
        self._command = [
            sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--response-store", "none",
            "--max-num-seqs", str(concurrency), "--batch-max-concurrency", str(concurrency), "--num-threads", "1",
            "--files-dir", str(folder / "files"), "--shutdown-timeout-s", "5",
        ]  # fmt: skip
        self._log = folder / "serve.log"
        self.start()

    def start(self) -> None:
        with self._log.open("w") as log:
            self.popen = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        while (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", self._log.read_text())) is None:
            assert self.popen.poll() is None, self._log.read_text()
            time.sleep(0.05)
        self.http = httpx.Client(base_url=found[1], timeout=60)

    def kill(self) -> None:
        self.http.close()
        children = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()
        psutil.wait_procs(children, 30)

    def kill_engine(self) -> None:
        """Kill the engine that lives, or else the next one as soon as it is there."""
        while not (engines := self._engines()):
            time.sleep(0.02)
        for engine in engines:
            engine.send_signal(signal.SIGKILL)

    def _engines(self) -> list[psutil.Process]:
        engines = []
        for child in psutil.Process(self.popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # and zombies
                if "engine" in " ".join(child.cmdline()):
                    engines.append(child)
        return engines

    def batch(self, name: str) -> dict:
        return self.http.get(f"/v1/batches/{name}").json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    choose = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), args.concurrency)
        try:
            run(server, args, choose)
        finally:
            server.kill()


def run(server: Server, args: argparse.Namespace, choose: random.Random) -> None:
    lengths = [choose.randrange(2, 24) for _ in range(args.lines)]
    text = "".join(
        json.dumps({
            "custom_id": f"r{index}", "method": "POST", "url": CHAT,
            "body": {"messages": [{"role": "user", "content": f"Count to {index}."}], "max_tokens": length,
                     "ignore_eos": True},
        }) + "\n"
        for index, length in enumerate(lengths)
    )  # fmt: skip
    file = server.http.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "7d"}
    name = server.http.post("/v1/batches", json=body).json()["id"]
    marks = sorted(choose.randrange(args.lines) for _ in range(args.kills))
    kinds: Counter[str] = Counter()
    start_s, num_done = time.monotonic(), 0
    for mark in marks:
        while (batch := server.batch(name))["request_counts"]["completed"] < mark and batch["status"] != "completed":
            time.sleep(0.02)
        if batch["status"] == "completed":
            break
        time.sleep(choose.random() * 0.2)
        num_done = batch["request_counts"]["completed"]
        victim = choose.choice(("server", "engine"))
        kinds[victim] += 1
        print(f"{time.monotonic() - start_s:7.1f} s  {num_done:6} lines done, kill the {victim}", flush=True)
        if victim == "engine":
            server.kill_engine()
        else:
            server.kill()
            server.start()
    while (batch := server.batch(name))["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
    seconds = time.monotonic() - start_s
    results = [
        json.loads(line)
        for kind in ("output_file_id", "error_file_id")
        if batch[kind] is not None
        for line in server.http.get(f"/v1/files/{batch[kind]}/content").text.splitlines()
    ]
    found = Counter(each["custom_id"] for each in results)
    missing = [index for index in range(args.lines) if not found[f"r{index}"]]
    twice = [custom_id for custom_id, count in found.items() if count > 1]
    short = [
        each["custom_id"]
        for each in results
        if each["response"]["status_code"] != 200
        or each["response"]["body"]["usage"]["completion_tokens"] != lengths[int(each["custom_id"][1:])]
    ]
    print(
        f"{batch['status']} after {seconds:.0f} s: {args.lines} lines, {kinds['server']} kills of the server and "
        f"{kinds['engine']} of the engine; {len(missing)} lines without an answer, {len(twice)} with two, "
        f"{len(short)} with less than a whole one"
    )
    sys.exit(bool(missing or twice or short) or batch["status"] != "completed")


if __name__ == "__main__":
    main()
