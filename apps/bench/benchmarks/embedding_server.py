"""What a server takes of embeddings: the rate over HTTP beside `LLM.embed`, and the memory of 10,000 texts in one call.

    python apps/bench/benchmarks/embedding_server.py rate MODEL [--clients 4] [--batch-size 64] [--encoding float]
    python apps/bench/benchmarks/embedding_server.py memory MODEL [--texts 10000] [--words 75]

rate: `LLM.embed` in a process of its own and a server embed the same texts, turn by turn; clients send bodies that were
written before and read answers without parsing them. Texts per second of the wall clock, and processor time per text of
all processes of the side that embeds; on a machine with other work, the second ratio says what serving costs.
memory: resident memory at its highest in the call, above what it was before, when a smaller call has warmed up: of the
process of `LLM.embed`, and of all processes of a server, whose highest points are added up.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire_testkit.tokenizers import sample_text

WARM_TEXTS = 512
"""Embedded before anything is measured."""
START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 3600
OFFLINE = """
import json, sys
from quire import LLM

llm = LLM(sys.argv[1], runner="pooling", num_threads=int(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    outputs = llm.embed(json.loads(line), use_tqdm=False)
    print(sum(len(each.outputs.pooled.data) for each in outputs), flush=True)
"""
"""Reads a line with texts, embeds them, and writes how many bytes their vectors have."""


def random_texts(count: int, num_words: int, seed: int) -> list[str]:
    """Texts of so many English words, each one another."""
    chance = random.Random(seed)
    words = sample_text(4 * num_words, seed).split()
    return [" ".join(chance.choices(words, k=num_words)) for _ in range(count)]


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    pids = [pid]
    for each in pids:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            pids += [int(child) for child in children.read_text().split()]
    return pids


class Side:
    """A process that embeds, and those below it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def cpu_s(self) -> float:
        """Processor time so far."""
        total = 0
        for pid in process_tree(self.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self, field: str) -> int:
        """Sum of a field of /proc/PID/status, VmRSS or VmHWM."""
        total = 0
        for pid in process_tree(self.process.pid):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
        return total

    def forget_peak(self) -> None:
        """Have VmHWM begin at what is resident now."""
        for pid in process_tree(self.process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def end(self) -> None:
        """Wait until the process is gone."""
        self.process.terminate()
        self.process.wait(60)


class Offline(Side):
    """`LLM.embed` in a process of its own."""

    name = "LLM.embed"

    def __init__(self, model: str, num_threads: int) -> None:
        command = [sys.executable, "-c", OFFLINE, model, str(num_threads)]
        super().__init__(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("the process of LLM.embed ended")
        return line

    def embed(self, texts: Sequence[str]) -> None:
        """All texts in one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(texts) + "\n")
        self.process.stdin.flush()
        self._answer()


class Server(Side):
    """`quire serve`, and clients of it in this process."""

    name = "server"

    def __init__(self, model: str, num_threads: int, num_clients: int, batch_size: int, encoding: str) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        command = [sys.executable, "-m", "quire_server.cli", "serve", model, "--runner", "pooling"]
        command += ["--port", str(self._port), "--num-threads", str(num_threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        super().__init__(subprocess.Popen(command, stdout=self._log, stderr=self._log, text=True))
        self._clients, self._num_clients = ThreadPoolExecutor(num_clients), num_clients
        self._batch_size, self._encoding = batch_size, encoding
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        self._log.seek(0)
        raise RuntimeError(f"the server did not come up: {self._log.read()[-2000:]}")

    def bodies(self, texts: Sequence[str]) -> list[bytes]:
        """Requests for texts."""
        batches = [texts[begin : begin + self._batch_size] for begin in range(0, len(texts), self._batch_size)]
        return [json.dumps({"input": batch, "encoding_format": self._encoding}).encode() for batch in batches]

    def embed(self, bodies: Sequence[bytes]) -> None:
        """Send requests, as many at a time as there are clients."""
        list(
            self._clients.map(self._send, [bodies[number :: self._num_clients] for number in range(self._num_clients)])
        )

    def _send(self, bodies: Sequence[bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        for body in bodies:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RuntimeError(content[:500].decode(errors="replace"))
        connection.close()


def measure_rate(args: argparse.Namespace) -> None:
    """Prints the rates of both sides, and their ratios."""
    texts = random_texts(args.texts, args.words, 0)
    offline = Offline(args.model, args.num_threads)
    server = Server(args.model, args.num_threads, args.clients, args.batch_size, args.encoding)
    try:
        offline.embed(texts[:WARM_TEXTS])
        server.embed(server.bodies(texts[:WARM_TEXTS]))
        bodies = server.bodies(texts)
        rates: dict[str, list[float]] = {offline.name: [], server.name: []}
        costs: dict[str, list[float]] = {offline.name: [], server.name: []}
        for number in range(args.rounds):
            for side in (offline, server) if number % 2 else (server, offline):
                cpu_s, start_s = side.cpu_s(), time.perf_counter()
                if isinstance(side, Offline):
                    side.embed(texts)
                elif isinstance(side, Server):
                    side.embed(bodies)
                seconds = time.perf_counter() - start_s
                rates[side.name].append(len(texts) / seconds)
                costs[side.name].append((side.cpu_s() - cpu_s) / len(texts))
                print(
                    f"round {number + 1}: {side.name:9} {rates[side.name][-1]:7.1f} texts/s, "
                    f"{1e3 * costs[side.name][-1]:.3f} ms of processor time per text",
                    flush=True,
                )
    finally:
        server.end()
        offline.end()
    ratios = [served / alone for served, alone in zip(rates[server.name], rates[offline.name], strict=True)]
    cost = statistics.median(costs[offline.name]) / statistics.median(costs[server.name])
    print(f"texts/s of the server beside LLM.embed, median of rounds: {statistics.median(ratios):.3f}")
    print(f"processor time per text of LLM.embed beside the server: {cost:.3f}")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def measure_memory(args: argparse.Namespace) -> None:
    """Prints how far memory goes up in one call."""
    texts = random_texts(args.texts, args.words, 0)
    warm = random_texts(WARM_TEXTS, args.words, 1)
    for kind in (Server,) if args.server_alone else (Offline, Server):
        side: Offline | Server
        if kind is Offline:
            side = Offline(args.model, args.num_threads)
        else:
            side = Server(args.model, args.num_threads, 1, len(texts), args.encoding)
        forms: tuple[Any, Any] = (warm, texts)
        if isinstance(side, Server):
            forms = side.bodies(warm), side.bodies(texts)
        try:
            side.embed(forms[0])
            idle = side.memory_bytes("VmRSS")
            side.forget_peak()
            side.embed(forms[1])
            peak = side.memory_bytes("VmHWM")
        finally:
            side.end()
        print(
            f"{side.name:9} {len(texts)} texts in one call: {(peak - idle) / 1e6:.1f} MB above {idle / 1e6:.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rate", "memory"))
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, help="default: 2048 for rate, 10000 for memory")
    parser.add_argument("--words", type=int, default=75, help="of each text")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="texts of a request")
    parser.add_argument("--encoding", choices=("float", "base64"), default="float")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-alone", action="store_true", help="of memory: leave LLM.embed out")
    args = parser.parse_args()
    args.texts = args.texts or (2048 if args.what == "rate" else 10_000)
    (measure_rate if args.what == "rate" else measure_memory)(args)


if __name__ == "__main__":
    main()
