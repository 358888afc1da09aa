"""Time between tokens of streams while long prompts come in: two servers that do both, beside a prefill server and a
decode server that are joined by a connector.

    python apps/bench/benchmarks/prefill_decode.py [--connector NixlConnector] [--router vllm-router|smg]

Each server has one thread. Streams run all the time, and long prompts, each with an answer of a few tokens, come one
after the other, the next one as soon as one is answered; where both servers do both, they take turns. With --router,
the command of the package vllm-router passes all requests on in its prefill/decode mode; else this program says what a
router says. Ends with status 1 when the p99 of the decode server is more than half of the other, or texts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

START_S = 300.0
ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """A server process, from when it answers; its address."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            end_s = time.monotonic() + START_S
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(url + "/health", timeout=5).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"{command[0]} does not answer:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Load:
    """What is sent, and what came back.

    Args:
        arguments: Of the command.
        servers: Addresses, the one that decodes last.
        way: "both" where each server does both, "client" where this program hands requests on, "router".
    """

    def __init__(self, arguments: argparse.Namespace, servers: list[str], way: str) -> None:
        self._arguments = arguments
        self._servers = servers
        self._way = way
        self.gaps_s: list[float] = []
        """Between tokens of one stream."""
        self.answers: dict[int, str] = {}
        """Number of a long prompt -> its answer."""
        self._client = httpx.AsyncClient(timeout=600)
        self._model = httpx.get(servers[-1] + "/v1/models").json()["data"][0]["id"]

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.post(url + "/v1/completions", json={"model": self._model, **body})
        return dict(answer.raise_for_status().json())

    async def _tokens(self, url: str, body: dict[str, Any]) -> AsyncIterator[float]:
        """When each piece of a stream came."""
        body = {"model": self._model, "stream": True, **body}
        async with self._client.stream("POST", url + "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    def _server(self, number: int) -> str:
        return self._servers[number % len(self._servers)] if self._way == "both" else self._servers[-1]

    async def stream(self, number: int) -> None:
        """Streams, one after the other, until cancelled."""
        while True:
            prompt, last_s = random.Random(number).choices(range(3, 300), k=20), 0.0
            body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            async for now_s in self._tokens(self._server(number), body):
                if last_s:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s

    async def long_prompts(self, worker: int, num_workers: int) -> None:
        """Every `num_workers`th long prompt."""
        for number in range(worker, self._arguments.prompts, num_workers):
            prompt = random.Random(1000 + number).choices(range(3, 300), k=self._arguments.prompt_tokens)
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            if self._way == "client":
                first = await self._post(self._servers[0], {**body, "max_tokens": 1, "kv_transfer_params": ASKS})
                body["kv_transfer_params"] = first["kv_transfer_params"]
            answer = await self._post(self._server(number), body)
            self.answers[number] = answer["choices"][0]["text"]

    async def run(self) -> None:
        """All of it."""
        streams = [asyncio.create_task(self.stream(number)) for number in range(self._arguments.streams)]
        await asyncio.gather(*(self.long_prompts(worker, 2) for worker in range(2)))
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self._client.aclose()


def measure(arguments: argparse.Namespace, way: str, roles: Sequence[str | None], folder: Path) -> Load:
    """Serve the load in one of the ways."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number, role in enumerate(roles):
            port = free_port()
            command = [sys.executable, "-m", "quire_server.cli", "serve", *arguments.model, "--port", str(port)]
            command += ["--num-threads", "1", "--kv-cache-memory-bytes", "500M", "--response-store", "none"]
            if role is not None:
                config = {"kv_connector": arguments.connector, "kv_role": role}
                command += ["--kv-transfer-config", json.dumps(config)]
            servers.append(stack.enter_context(running(command, port, folder / f"{way}{number}.log")))
        if way == "router":
            port = free_port()
            is_smg = Path(arguments.router).name == "smg"
            command = [arguments.router, "--vllm-pd-disaggregation", "--prefill", servers[0], "--decode", servers[1]]
            command += ["--kv-connector", "nixl"]
            if is_smg:
                command = [arguments.router, "launch", "--pd-disaggregation"]
            command += ["--policy", "round_robin", "--host", "127.0.0.1"]
            command += ["--port", str(port), "--prometheus-port", str(free_port())]
            servers.append(stack.enter_context(running(command, port, folder / "router.log")))
            if is_smg:
                tell_workers(servers, arguments.connector)
        load = Load(arguments, servers, way)
        asyncio.run(load.run())
        if way != "both":
            metrics = httpx.get(servers[1] + "/metrics").text.splitlines()
            hits = next(line for line in metrics if line.startswith("quire:external_prefix_cache_hits_total"))
            print(f"{way}: the decode server read {float(hits.split()[-1]):.0f} tokens from the prefill server")
        return load


def tell_workers(servers: Sequence[str], connector: str) -> None:
    """Tell smg, the last server, of the others: what their connector is, it asks nobody."""
    *workers, smg = servers
    for url, kind, role in zip(workers, ("prefill", "decode"), ("kv_producer", "kv_consumer"), strict=True):
        worker = {"url": url, "worker_type": kind, "runtime_type": "vllm", "kv_connector": connector, "kv_role": role}
        httpx.post(smg + "/workers", json=worker).raise_for_status()
    end_s = time.monotonic() + START_S
    while sum(each["is_healthy"] for each in httpx.get(smg + "/workers").json()["workers"]) < len(workers):
        if time.monotonic() > end_s:
            raise SystemExit("smg does not reach the servers")
        time.sleep(0.2)


def p99_ms(load: Load) -> float:
    """99th percentile of the times between tokens."""
    return 1000 * statistics.quantiles(load.gaps_s, n=100)[98]


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=1, default=[], help="folder or name; the demo model without")
    parser.add_argument("--connector", default="SocketConnector")
    parser.add_argument("--router", help="command of vllm-router, or of smg")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=40, help="long prompts")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    arguments = parser.parse_args()
    way = "router" if arguments.router else "client"
    with tempfile.TemporaryDirectory() as folder:
        together = measure(arguments, "both", (None, None), Path(folder))
        apart = measure(arguments, way, ("kv_producer", "kv_consumer"), Path(folder))
    for name, load in (("two servers that do both", together), ("prefill and decode apart", apart)):
        median = 1000 * statistics.median(load.gaps_s)
        print(f"{name}: {median:.2f} ms between tokens, p99 {p99_ms(load):.2f} ms, of {len(load.gaps_s)}")
    num_different = sum(together.answers[number] != answer for number, answer in apart.answers.items())
    print(f"p99 ratio {p99_ms(apart) / p99_ms(together):.2f}, {num_different} of {len(apart.answers)} answers differ")
    return int(p99_ms(apart) > 0.5 * p99_ms(together) or num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
