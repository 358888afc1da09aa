"""`quire bench serve`: load on any OpenAI-compatible server, over HTTP, bounded in count and time.

Prompts are token ids of exact lengths (the completions route takes them), outputs are forced to their length with
ignore_eos. Knows nothing of the engine behind the address.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from quire_interfaces import ConfigError, QuireError
from rich.progress import Progress

from quire_bench.report import percentiles
from quire_bench.workload import BenchRequest

__all__ = ["ServeLoad", "Timing", "run_serve", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """How the requests are sent."""

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """None asks the server for its first model."""
    max_concurrency: int = 16
    request_rate: float | None = None
    """Requests per second with Poisson arrivals; None sends as concurrency allows."""
    timeout_s: float = 600.0
    """Bound on the whole run."""
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(slots=True)
class Timing:
    """What one request took; times in seconds from its sending."""

    num_input_tokens: int
    num_output_tokens: int = 0
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between consecutive events of the stream."""
    total_s: float = 0.0
    error: str | None = None


async def run_serve(load: ServeLoad, requests: list[BenchRequest], progress: Progress) -> list[Timing]:
    """Send all requests; returns one timing each, in the order of `requests`.

    Raises:
        QuireError: nothing answers at the address.
    """
    headers = {"Authorization": f"Bearer {load.api_key or os.environ.get('OPENAI_API_KEY', 'none')}"}
    connector = aiohttp.TCPConnector(limit=load.max_concurrency)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        model = load.model or await _first_model(session, load.base_url)
        gate = asyncio.Semaphore(load.max_concurrency)
        task = progress.add_task("requests", total=len(requests))

        async def one(request: BenchRequest) -> Timing:
            async with gate:
                timing = await _send(session, load, model, request)
            progress.advance(task)
            return timing

        chooser, sending = random.Random(load.seed), []
        for request in requests:
            sending.append(asyncio.create_task(one(request)))
            if load.request_rate is not None:
                await asyncio.sleep(chooser.expovariate(load.request_rate))
        return await asyncio.gather(*sending)


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            response.raise_for_status()
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, KeyError, IndexError, OSError) as error:
        raise QuireError(
            f"no OpenAI-compatible server answers at {base_url}/v1/models ({error}); start one with `quire serve`, "
            "or name another with --base-url"
        ) from error


async def _send(session: aiohttp.ClientSession, load: ServeLoad, model: str, request: BenchRequest) -> Timing:
    timing = Timing(len(request.prompt_token_ids))
    body = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.extra_body,
    }
    start = last = time.perf_counter()
    try:
        async with session.post(f"{load.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                timing.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return timing
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    timing.num_output_tokens = event["usage"]["completion_tokens"]
                if not event.get("choices"):
                    continue
                now = time.perf_counter()
                if timing.first_token_s is None:
                    timing.first_token_s = now - start
                else:
                    timing.gaps_s.append(now - last)
                last = now
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.total_s = time.perf_counter() - start
    return timing


def summarize(timings: list[Timing], wall_s: float) -> dict[str, Any]:
    """Figures of a run. Latencies in seconds; failed requests count in num_failed only.

    Raises:
        ConfigError: every request failed; the message carries the first failure.
    """
    good = [timing for timing in timings if timing.error is None]
    if not good:
        raise ConfigError(f"all {len(timings)} requests failed; the first one: {timings[0].error}")
    output_tokens = sum(timing.num_output_tokens for timing in good)
    per_token = [
        (timing.total_s - timing.first_token_s) / (timing.num_output_tokens - 1)
        for timing in good
        if timing.first_token_s is not None and timing.num_output_tokens > 1
    ]
    return {
        "num_requests": len(timings),
        "num_failed": len(timings) - len(good),
        "first_failure": next((timing.error for timing in timings if timing.error), None),
        "duration_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "input_tokens": sum(timing.num_input_tokens for timing in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / wall_s,
        "time_to_first_token_s": percentiles([t.first_token_s for t in good if t.first_token_s is not None]),
        "inter_token_latency_s": percentiles([gap for timing in good for gap in timing.gaps_s]),
        "time_per_output_token_s": percentiles(per_token),
        "end_to_end_s": percentiles([timing.total_s for timing in good]),
    }
