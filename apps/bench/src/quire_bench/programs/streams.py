"""Clients of a server of the OpenAI API that runs beside the program: each streams its answers one after another."""

from __future__ import annotations

import atexit
import http.client
import itertools
import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from program import Run, check_lengths

FIRST_PROMPT = [list(range(10, 18))]
"""Of one client."""


def free_port() -> int:
    """Of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(command: list[str], port: int) -> None:
    """Start a server and wait until `/health` says that it is well.

    Raises:
        RuntimeError: it ended instead.
    """
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(_end, server)
    while not _is_well(port):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode} while it started")
        time.sleep(0.01)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()


def _is_well(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def clients(port: int, body: dict[str, Any]) -> Run:
    """A program's `run`: a thread for each client, whose prompts are lists of token ids.

    Args:
        port: Of the server.
        body: Fields of each request beside the usual ones.

    Returns:
        The run; it says "ttft_s", the time to the first token of each request, and "itl_s", all gaps between pieces.
    """

    def stream(prompt: list[int], length: int) -> tuple[list[float], int]:
        asked = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
        asked |= {"stream_options": {"include_usage": True}, **body}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read(500)!r}")
        times, num_tokens = [start], 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event.get("choices"):
                times.append(now)
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
        connection.close()
        return times, num_tokens

    def ask(prompts: list[list[int]], length: int) -> tuple[list[float], list[float], list[int]]:
        firsts: list[float] = []
        gaps: list[float] = []
        counts: list[int] = []
        for prompt in prompts:
            times, num_tokens = stream(prompt, length)
            firsts.append(times[1] - times[0])
            # The last piece may hold no token, but the reason of the end.
            pieces = times[1 : num_tokens + 1]
            gaps += [after - before for before, after in itertools.pairwise(pieces)]
            counts.append(num_tokens)
        return firsts, gaps, counts

    def run(prompts: list[Any], output_lens: list[int]) -> dict[str, Any]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts, output_lens))
        for (_, _, counts), length in zip(answers, output_lens, strict=True):
            check_lengths(counts, [length] * len(counts))
        return {
            "ttft_s": [each for firsts, _, _ in answers for each in firsts],
            "itl_s": [each for _, gaps, _ in answers for each in gaps],
        }

    return run
