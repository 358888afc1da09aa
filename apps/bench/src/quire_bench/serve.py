"""`quire bench serve`: load on any OpenAI-compatible server, over HTTP, bounded in count and time.

Prompts are token ids of exact lengths (the completions route takes them); outputs are kept to their length with
ignore_eos, which servers that do not know it ignore. Knows nothing of the engine behind the address.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from quire_bench.report import percentiles
from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError, QuireError

__all__ = ["ServeLoad", "Timing", "run_serve", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """How the requests are sent.

    Raises:
        ConfigError: a value that cannot work.
    """

    base_url: str = "http://127.0.0.1:8000"
    """With or without a closing /v1."""
    model: str | None = None
    """None asks the server for its first model."""
    max_concurrency: int | None = None
    """Requests in flight; None bounds them only by their number."""
    request_rate: float | None = None
    """Requests per second with Poisson arrivals; None sends as concurrency allows."""
    timeout_s: float = 600.0
    """Bound on the whole run; what is not finished then has failed."""
    api_key: str | None = None
    """None takes OPENAI_API_KEY from the environment, if it is there."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """More fields of each request."""
    seed: int = 0
    """Of the arrivals."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url must begin with http:// or https://, got {self.base_url!r}; for example "
                "http://127.0.0.1:8000",
                field="base_url",
            )
        for name in ("max_concurrency", "request_rate", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}", field=name)

    def url(self, route: str) -> str:
        """Address of a route such as "/v1/models"."""
        return self.base_url.rstrip("/").removesuffix("/v1") + route

    def headers(self) -> dict[str, str]:
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(slots=True)
class Timing:
    """What one request took. Times in seconds from when it was due: from its sending, or, with a request rate, from
    its arrival, so that waiting for a free place in the concurrency counts."""

    num_input_tokens: int
    wanted_output_tokens: int
    num_output_tokens: int = 0
    """As the server counts; the number of events where it does not."""
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between consecutive events with tokens. An event has one token unless the server joins some."""
    total_s: float | None = None
    """None until the request has ended."""
    error: str | None = None


async def run_serve(
    load: ServeLoad, requests: Sequence[BenchRequest], on_done: Callable[[], object] = lambda: None
) -> tuple[list[Timing], float]:
    """Send all requests and wait for them, or until the time is up.

    Args:
        load: How.
        requests: What.
        on_done: Called after each request.

    Returns:
        One timing per request, in order, and the seconds from the first sending to the last end.

    Raises:
        QuireError: no model was named, and the server does not say which it has.
    """
    timings = [Timing(len(request.prompt_token_ids), request.output_len) for request in requests]
    connector = aiohttp.TCPConnector(limit=0)  # the load has its own bound
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, headers=load.headers(), timeout=timeout) as session:
        model = load.model or await _first_model(session, load)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(load.timeout_s):
                await _send_all(session, load, model, requests, timings, on_done)
        except TimeoutError:
            for timing in timings:
                if timing.total_s is None:
                    timing.error = f"not finished when the run's {load.timeout_s:g} s were over"
        return timings, time.perf_counter() - start


async def _first_model(session: aiohttp.ClientSession, load: ServeLoad) -> str:
    url = load.url("/v1/models")
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
            if response.status in (401, 403):
                raise QuireError(f"{url} wants an API key (HTTP {response.status}); give --api-key or OPENAI_API_KEY")
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, LookupError, TypeError) as error:
        raise QuireError(
            f"no OpenAI-compatible server answers at {url} ({type(error).__name__}: {error}); start one with "
            "`quire serve`, or name another with --base-url"
        ) from error


async def _send_all(
    session: aiohttp.ClientSession,
    load: ServeLoad,
    model: str,
    requests: Sequence[BenchRequest],
    timings: Sequence[Timing],
    on_done: Callable[[], object],
) -> None:
    gate = asyncio.Semaphore(load.max_concurrency or len(requests))
    chooser, due = random.Random(load.seed), time.perf_counter()

    def finish(_: asyncio.Task[None]) -> None:
        gate.release()
        on_done()

    async with asyncio.TaskGroup() as group:
        for request, timing in zip(requests, timings, strict=True):
            if load.request_rate is not None:
                await asyncio.sleep(due - time.perf_counter())
            await gate.acquire()
            start = time.perf_counter() if load.request_rate is None else due
            group.create_task(_send(session, load, model, request, timing, start)).add_done_callback(finish)
            if load.request_rate is not None:
                due += chooser.expovariate(load.request_rate)


async def _send(
    session: aiohttp.ClientSession, load: ServeLoad, model: str, request: BenchRequest, timing: Timing, start: float
) -> None:
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
    try:
        async with session.post(load.url("/v1/completions"), json=body) as response:
            if response.status == 200:
                timing.error = await _read_stream(response.content, timing, start)
            else:
                timing.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:300]}"
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.total_s = time.perf_counter() - start


async def _read_stream(lines: aiohttp.StreamReader, timing: Timing, start: float) -> str | None:
    """Fill the timing from server-sent events; what went wrong, if anything did."""
    last, events, counted = start, 0, None
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            timing.num_output_tokens = events if counted is None else counted
            return None
        event = json.loads(data)
        if not isinstance(event, dict) or event.get("error"):
            return f"error in the stream: {data[:300].decode(errors='replace')}"
        if event.get("usage"):
            counted = int(event["usage"].get("completion_tokens", 0))
        if event.get("choices"):
            now = time.perf_counter()
            if timing.first_token_s is None:
                timing.first_token_s = now - start
            else:
                timing.gaps_s.append(now - last)
            last, events = now, events + 1
    return "the stream broke off before its end"


def summarize(timings: Sequence[Timing], wall_s: float) -> dict[str, Any]:
    """Figures of a run. Latencies are percentiles in seconds over the requests that did not fail."""
    good = [timing for timing in timings if timing.error is None]
    failures = Counter(timing.error for timing in timings if timing.error is not None)
    output_tokens = sum(timing.num_output_tokens for timing in good)
    per_token = [
        (timing.total_s - timing.first_token_s) / (timing.num_output_tokens - 1)
        for timing in good
        if timing.total_s is not None and timing.first_token_s is not None and timing.num_output_tokens > 1
    ]
    return {
        "num_requests": len(timings),
        "num_failed": len(timings) - len(good),
        "most_common_failure": failures.most_common(1)[0][0] if failures else None,
        "num_other_length": sum(timing.num_output_tokens != timing.wanted_output_tokens for timing in good),
        "duration_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "input_tokens": sum(timing.num_input_tokens for timing in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / wall_s,
        "time_to_first_token_s": percentiles([t.first_token_s for t in good if t.first_token_s is not None]),
        "inter_token_latency_s": percentiles([gap for timing in good for gap in timing.gaps_s]),
        "time_per_output_token_s": percentiles(per_token),
        "end_to_end_s": percentiles([timing.total_s for timing in good if timing.total_s is not None]),
    }
