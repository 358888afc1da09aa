"""Routers that people run already, in front of Quire servers: how many prompt tokens they send where these are cached.

    python apps/bench/benchmarks/router_prefix_hits.py [--bin FOLDER] [--servers 2] [--conversations 8] [--turns 5]
    python apps/bench/benchmarks/router_prefix_hits.py --server URL=EVENTS,REPLAY --server ...

Conversations grow turn by turn, in another order each round, through each router in each of its modes; the prompts of
each mode are its own. The share of prompt tokens that servers had cached is printed beside the share that is possible
(all but the first turns, whole blocks).

Routers are commands of the packages `vllm-router` and `smg`, looked for in --bin and on the PATH. One that is not there
is skipped, with a line that says so, and an exit status of 3. kv_aware reads KV cache events with replay; all others
know nothing but the requests that they passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK = 16
START_S = 300.0
SKIPPED = 3
"""Exit status when a router was not there."""


class Server(NamedTuple):
    """A Quire server that publishes its KV cache events."""

    url: str
    events: str
    replay: str


class Mode(NamedTuple):
    """A router with one of its policies."""

    command: str
    policy: str
    reads_events: bool = False


MODES = (
    Mode("vllm-router", "round_robin"),
    Mode("vllm-router", "cache_aware"),
    Mode("vllm-router", "kv_aware", reads_events=True),
    Mode("smg", "cache_aware"),
)


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    """Answer to a JSON body. Raises OSError when there is none."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def wait_until_routed(url: str, model: str) -> None:
    """Wait until a router has taken its servers in: before, it answers with errors."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            post(url + "/v1/completions", {"model": model, "prompt": "page", "max_tokens": 1})
            return
        except OSError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.2)


def wait_until(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until GET `url` is answered."""
    end_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"{' '.join(map(str, process.args))} does not answer at {url}")  # type: ignore[arg-type]
        time.sleep(0.2)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file, ended at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def quire_servers(count: int, model: str | None, folder: Path) -> Iterator[list[Server]]:
    """Servers on the loopback address, on one thread each."""
    with contextlib.ExitStack() as stack:
        servers, processes = [], []
        for number in range(count):
            ports = [free_port() for _ in range(3)]
            server = Server(f"http://127.0.0.1:{ports[0]}", *(f"tcp://127.0.0.1:{port}" for port in ports[1:]))
            events = {"enable_kv_cache_events": True, "endpoint": server.events, "replay_endpoint": server.replay}
            command = [
                sys.executable,
                "-m",
                "quire_server.cli",
                "serve",
                *([model] if model else []),
                "--num-threads",
                "1",
            ]
            command += ["--port", str(ports[0]), "--block-size", str(BLOCK), "--kv-cache-memory-bytes", "200M"]
            command += ["--kv-events-config", json.dumps(events)]
            processes.append(stack.enter_context(running(command, folder / f"server{number}.log")))
            servers.append(server)
        for server, process in zip(servers, processes, strict=True):
            wait_until(server.url + "/health", process)
        yield servers


def router_command(path: str, mode: Mode, servers: Sequence[Server], model: str, port: int) -> list[str]:
    """Command line of a router in front of the servers."""
    command = [path, *(["launch"] if mode.command == "smg" else []), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", mode.policy, "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(server.url for server in servers)]
    if mode.reads_events:
        for server in servers:
            command += ["--kv-event-source", f"{server.url}={server.events}"]
            command += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
        command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", model]
    return command


class Hits(NamedTuple):
    """What one mode came to."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_possible_tokens: int
    """Tokens that would have been cached if every conversation had stayed where it began."""
    num_requests: int
    seconds: float


def converse(url: str, model: str, name: str, num_conversations: int, num_turns: int) -> Hits:
    """Lead conversations through a router, turn by turn."""
    rng = random.Random(7)
    prompts = [f"{number}. Conversation of {name}." for number in range(num_conversations)]
    lengths = [0] * num_conversations
    prompt_tokens = cached_tokens = possible_tokens = 0
    start_s = time.monotonic()
    for turn in range(num_turns):
        for number in rng.sample(range(num_conversations), num_conversations):
            prompts[number] += "".join(f" In turn {turn} it gathers page {page}." for page in range(8))
            body = {"model": model, "prompt": prompts[number], "max_tokens": 4, "temperature": 0}
            answer = post(url + "/v1/completions", body)
            usage = answer["usage"]
            assert isinstance(usage, dict)
            prompt_tokens += usage["prompt_tokens"]
            cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            possible_tokens += lengths[number] // BLOCK * BLOCK
            lengths[number] = usage["prompt_tokens"]
            time.sleep(0.02)  # events are published after the answer; people need longer to reply
    num_requests = num_conversations * num_turns
    return Hits(prompt_tokens, cached_tokens, possible_tokens, num_requests, time.monotonic() - start_s)


def main() -> int:
    """Run all modes; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="", help="folder with the routers' commands")
    parser.add_argument(
        "--server", action="append", default=[], metavar="URL=EVENTS,REPLAY", help="one that runs already"
    )
    parser.add_argument("--servers", type=int, default=2, help="servers to start where none is named")
    parser.add_argument("--model", help="folder; the embedded demo model without it")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    path = os.pathsep.join(filter(None, (args.bin, os.environ.get("PATH", ""))))
    places = {mode.command: shutil.which(mode.command, path=path) for mode in MODES}
    missing = sorted(command for command, place in places.items() if place is None)
    for command in missing:
        print(f"SKIPPED: {command} is not installed; pip install {command} into a folder and name it with --bin")
    if len(missing) == len(places):
        return SKIPPED
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [Server(url, *rest.split(",")) for url, _, rest in (each.partition("=") for each in args.server)]
        servers = servers or stack.enter_context(quire_servers(args.servers, args.model, folder))
        with urllib.request.urlopen(servers[0].url + "/v1/models", timeout=30) as answer:
            model = json.load(answer)["data"][0]["id"]
        print(f"{len(servers)} servers of {model}; {args.conversations} conversations of {args.turns} turns")
        for mode in MODES:
            place = places[mode.command]
            if place is None:
                continue
            port = free_port()
            with running(router_command(place, mode, servers, model, port), folder / "router.log") as process:
                wait_until(f"http://127.0.0.1:{port}/health", process)
                wait_until_routed(f"http://127.0.0.1:{port}", model)
                name = f"{mode.command} {mode.policy} {time.time():.0f}"
                hits = converse(f"http://127.0.0.1:{port}", model, name, args.conversations, args.turns)
            print(
                f"{mode.command:12} {mode.policy:12} {hits.num_requests} requests, "
                f"{hits.num_prompt_tokens} prompt tokens: "
                f"{hits.num_cached_tokens / hits.num_prompt_tokens:.1%} cached, "
                f"{hits.num_possible_tokens / hits.num_prompt_tokens:.1%} possible ({hits.seconds:.1f} s)",
                flush=True,
            )
    return SKIPPED if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
