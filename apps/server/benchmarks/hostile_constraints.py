"""What expensive constraints of some clients cost the token streams of others.

    python apps/server/benchmarks/hostile_constraints.py [--rounds 12] [--streams 4] [--attackers 1] [--num-threads 1]

Serves the demo model. First says how much processor time the API process and the engine's process take per hostile
request of each kind, which does not depend on what else the machine does. Then plain streams run all the time, while
another client sends, in turn: nothing; plain requests, for whatever any further request costs; requests with harmless
constraints; and schemas and patterns that are expensive to compile or to refuse, one after another, each time with new
content. Compared is the time between events of the streams. The phases are short and take turns often, so that other
programs of the machine disturb all of them alike; what they do in one round moves the p99 of all gaps nevertheless, so
the last lines also compare round by round. How long the engine's thread waited for a core in each phase is said, too.
Both clients talk HTTP over bare sockets, so that what a client costs is not taken for what the server costs; requests
are written before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
HARMLESS: list[dict[str, Any]] = [
    {"regex": "[a-z]{1,9}"},
    {"json": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}},
]
PHASES: dict[str, list[dict[str, Any]]] = {"quiet": [], "plain": [{}], "harmless": HARMLESS, "hostile": HOSTILE}
NUM_TOKENS = 900
PHASE_S = 2.0
NUM_WRITTEN = 24
PAUSE_S = 0.1
"""Between two requests, so that those that are answered quickly are not many more."""


def post(body: bytes) -> bytes:
    """A whole request."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\nconnection: close\r\n\r\n" + body


def bodies(kinds: list[dict[str, Any]], first: int = 0) -> Iterator[bytes]:
    """Requests with constraints, none of them twice."""
    for number, constraint in zip(itertools.count(first), itertools.cycle(kinds), strict=False):
        wanted = dict(constraint)
        if not wanted:
            yield json.dumps({"prompt": "x", "max_tokens": 5}).encode()
            continue
        if "regex" in wanted:
            wanted["regex"] += f"|z{number}"
        elif isinstance(wanted["json"], str):
            wanted["json"] += " " * number
        else:
            wanted["json"] = {**wanted["json"], "title": str(number)}
        yield json.dumps({"prompt": "x", "max_tokens": 5, "structured_outputs": wanted}).encode()


def ask(address: tuple[str, int], request: bytes) -> int:
    """Send a request and read its answer. The status."""
    with socket.create_connection(address, timeout=120) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer.split(maxsplit=2)[1])


def attack(address: tuple[str, int], num_attackers: int, orders: Connection) -> None:
    """In a process of its own: per order (phase, seconds) send requests, and answer with their statuses."""

    def send(requests: list[bytes], end_s: float) -> list[int]:
        statuses = []
        while requests and time.monotonic() < end_s:
            statuses.append(ask(address, requests.pop(0)))
            time.sleep(PAUSE_S)
        return statuses

    sources = {name: map(post, bodies(kinds)) for name, kinds in PHASES.items()}
    written = {name: [*itertools.islice(source, NUM_WRITTEN)] for name, source in sources.items()}
    while order := orders.recv():
        name, end_s = order[0], time.monotonic() + order[1]
        with ThreadPoolExecutor(num_attackers) as pool:
            sent = [pool.submit(send, written[name], end_s) for _ in range(num_attackers)]
        statuses = [status for each in sent for status in each.result()]
        time.sleep(max(0.0, end_s - time.monotonic()))
        orders.send(statuses)
        written[name] += itertools.islice(sources[name], len(statuses))
        orders.send(None)


class Streams:
    """Plain streams that never end: whenever one is over, another begins."""

    def __init__(self, address: tuple[str, int], num_streams: int) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        body = {"prompt": "Tell me", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        self._request = post(json.dumps(body).encode())
        for _ in range(num_streams):
            self._begin()

    def _begin(self) -> None:
        connection = socket.create_connection(self._address, timeout=120)
        connection.sendall(self._request)
        self._selector.register(connection, selectors.EVENT_READ, [0.0])

    def read(self, is_over: Any) -> list[float]:
        """Read until `is_over()`; the seconds between events of the same stream."""
        gaps_s: list[float] = []
        for key in self._selector.get_map().values():
            key.data[0] = 0.0
        while not is_over():
            for key, _ in self._selector.select(0.05):
                part = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                now_s = time.perf_counter()
                if not part:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    self._begin()
                elif b"data: {" in part:
                    if key.data[0]:
                        gaps_s.append(now_s - key.data[0])
                    key.data[0] = now_s
        return gaps_s


def processor_ms(process_id: int) -> float:
    """Processor time of a process so far (Linux: the clock of another process, as clock_getcpuclockid(3))."""
    return time.clock_gettime((~process_id << 3) | 2) * 1e3


def waited_s(process_id: int) -> float:
    """How long a process's first thread was ready to run and had no core (Linux)."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[1]) / 1e9


def children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def engine_of(api_id: int) -> int:
    """The engine's process."""
    others = (b"large_bodies", b"tracker")
    found = [
        child for child in children(api_id) if not any(n in Path(f"/proc/{child}/cmdline").read_bytes() for n in others)
    ]
    assert len(found) == 1, found
    return found[0]


def processor_time(address: tuple[str, int], api_id: int, num_requests: int = 5) -> None:
    """Print what hostile requests of each kind cost the processes that others wait for."""
    ids = {"API": api_id, "engine": engine_of(api_id)}
    for kind in HOSTILE:
        prepared = [post(body) for body in itertools.islice(bodies([kind], 10_000), num_requests)]
        before = {name: processor_ms(each) for name, each in ids.items()}
        statuses = {ask(address, request) for request in prepared}
        spent = ", ".join(f"{name} {(processor_ms(ids[name]) - before[name]) / num_requests:6.1f} ms" for name in ids)
        print(f"{str(kind)[:40]:<42}{len(prepared[0]):>9} bytes, status {statuses}: {spent}", flush=True)


def percentile_ms(gaps_s: list[float], share: float) -> float:
    return sorted(gaps_s)[int(share * (len(gaps_s) - 1))] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1, help="of the engine")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0"]
    command += ["--num-threads", str(options.num_threads)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        url = next(found for line in server.stdout if (found := re.search(r"OpenAI API:\s+(http://\S+)/v1", line)))
        parts = urlsplit(url.group(1))
        address = (parts.hostname or "", parts.port or 0)
        for request in map(post, itertools.islice(bodies(HARMLESS, 20_000), 4)):
            ask(address, request)
        processor_time(address, server.pid)
        ours, theirs = processes.Pipe()
        attacker = processes.Process(target=attack, args=(address, options.attackers, theirs), daemon=True)
        attacker.start()
        measure(Streams(address, options.streams), engine_of(server.pid), ours, options.rounds)
        ours.send(None)
        attacker.join(30)
    finally:
        server.terminate()
        server.wait(30)


def measure(streams: Streams, engine_id: int, orders: Connection, num_rounds: int) -> None:
    """Let the phases take turns, and print the time between events in each."""
    rounds_s: dict[str, list[list[float]]] = {name: [] for name in PHASES}
    waits: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    times: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    statuses: dict[str, list[int]] = {name: [] for name in PHASES}
    end_s = time.monotonic() + PHASE_S
    streams.read(lambda: time.monotonic() > end_s)  # warm-up
    names = list(PHASES)
    for number in range(num_rounds):
        for name in names if number % 2 else reversed(names):
            before_s, start_s = waited_s(engine_id), time.monotonic()
            orders.send((name, PHASE_S))
            rounds_s[name].append(streams.read(orders.poll))
            waits[name] += waited_s(engine_id) - before_s
            times[name] += time.monotonic() - start_s
            statuses[name] += orders.recv()
            streams.read(orders.poll)  # while the attacker writes its next requests
            orders.recv()
    gaps_s = {name: [*itertools.chain(*each)] for name, each in rounds_s.items()}
    for name in names:
        shares = (0.5, 0.9, 0.99, 0.999, 1.0)
        figures = "".join(f"  p{share * 100:g} {percentile_ms(gaps_s[name], share):7.2f} ms" for share in shares)
        print(
            f"{name:<9}{figures}; {len(gaps_s[name])} gaps, {len(statuses[name])} requests, "
            f"{statuses[name].count(400)} refused, {statuses[name].count(200)} answered; the engine's thread waited "
            f"for a core {100 * waits[name] / times[name]:.0f} % of the time"
        )
    quiet = percentile_ms(gaps_s["quiet"], 0.99)
    of_rounds = {name: [percentile_ms(each, 0.99) for each in rounds] for name, rounds in rounds_s.items()}
    for name in names[1:]:
        moved = [100 * (p99 / before - 1) for p99, before in zip(of_rounds[name], of_rounds["quiet"], strict=True)]
        low, middle, high = statistics.quantiles(moved, n=4)
        print(
            f"p99 {name}: of all gaps {100 * (percentile_ms(gaps_s[name], 0.99) / quiet - 1):+.0f} %; of the rounds "
            f"median {middle:+.0f} %, half of them {low:+.0f} to {high:+.0f} %"
        )


if __name__ == "__main__":
    main()
