"""`quire bench serve`: load on any OpenAI-compatible server, over HTTP, bounded in count and time.

Prompts are token ids of exact lengths (the completions route takes them), texts, or messages; outputs are kept to their
length with ignore_eos, which servers that do not know it ignore. Knows nothing of the engine behind the address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from quire_bench.arrivals import Arrivals, RampUp
from quire_bench.datasets import Conversation, TextRequest
from quire_bench.report import percentiles
from quire_bench.workload import BenchRequest
from quire_interfaces import ConfigError, QuireError

__all__ = ["ENDPOINTS", "ServeLoad", "ServeRequest", "Timing", "run_serve", "summarize", "wait_until_ready"]

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backend -> its route."""
READY_LOOK_S = 1.0

ServeRequest = BenchRequest | TextRequest | Conversation


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
    backend: Literal["openai", "vllm", "openai-chat"] = "openai"
    """openai and vllm: text or token ids to the completions route; openai-chat: messages."""
    endpoint: str | None = None
    """Path of the route; None takes the backend's."""
    burstiness: float = 1.0
    """Of the arrivals (`Arrivals`)."""
    ramp_up: RampUp | None = None
    """A rate that grows, in the place of `request_rate`."""
    extra_headers: dict[str, str] = field(default_factory=dict)
    ignore_eos: bool = True
    """Ask for outputs of exact lengths."""

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"backend must be {', '.join(ENDPOINTS)}, got {self.backend!r}", field="backend")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(
                f"endpoint must be a path such as /v1/completions, got {self.endpoint!r}", field="endpoint"
            )
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url must begin with http:// or https://, got {self.base_url!r}; for example "
                "http://127.0.0.1:8000",
                field="base_url",
            )
        for name in ("max_concurrency", "request_rate", "timeout_s", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}", field=name)

    def url(self, route: str) -> str:
        """Address of a route such as "/v1/models"."""
        return self.base_url.rstrip("/").removesuffix("/v1") + route

    def headers(self) -> dict[str, str]:
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        return {**({"Authorization": f"Bearer {key}"} if key else {}), **self.extra_headers}

    def arrivals(self) -> Arrivals | None:
        """None where requests are sent as concurrency allows."""
        if self.ramp_up is not None:
            return Arrivals(rate=self.ramp_up.end_rps, burstiness=self.burstiness, ramp_up=self.ramp_up, seed=self.seed)
        if self.request_rate is None or math.isinf(self.request_rate):
            return None
        return Arrivals(rate=self.request_rate, burstiness=self.burstiness, seed=self.seed)


@dataclass(slots=True)
class Timing:
    """What one request took. Times in seconds from when it was due: from its sending, or, with a request rate, from
    its arrival, so that waiting for a free place in the concurrency counts."""

    num_input_tokens: int
    """As the server counts, where nobody knew before."""
    wanted_output_tokens: int | None
    """None: as many as the model says."""
    num_output_tokens: int = 0
    """As the server counts; the number of events where it does not."""
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between consecutive events with tokens. An event has one token unless the server joins some."""
    total_s: float | None = None
    """None until the request has ended."""
    error: str | None = None
    start_s: float = 0.0
    """When it was due, since the start of the run."""
    text: str = ""
    """Of the answer."""


async def run_serve(
    load: ServeLoad, requests: Sequence[ServeRequest], on_done: Callable[[], object] = lambda: None
) -> tuple[list[Timing], float]:
    """Send all requests and wait for them, or until the time is up.

    Args:
        load: How.
        requests: What. Turns of a conversation are sent one after another.
        on_done: Called after each of them.

    Returns:
        One timing per request or turn, in order, and the seconds from the first sending to the last end.

    Raises:
        QuireError: no model was named, and the server does not say which it has.
    """
    if load.backend == "openai-chat" and any(isinstance(each, BenchRequest) for each in requests):
        raise ConfigError(
            "openai-chat sends text, and these prompts are token ids: name the model's tokenizer with --tokenizer, or "
            "use the backend openai",
            field="backend",
        )
    if load.backend != "openai-chat" and any(_needs_chat(each) for each in requests):
        raise ConfigError("messages and images need the backend openai-chat", field="backend")
    chains = [request.turns if isinstance(request, Conversation) else (request,) for request in requests]
    rows = [[_timing_of(turn) for turn in turns] for turns in chains]
    timings = [timing for row in rows for timing in row]
    connector = aiohttp.TCPConnector(limit=0)  # the load has its own bound
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, headers=load.headers(), timeout=timeout) as session:
        model = load.model or await _first_model(session, load)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(load.timeout_s):
                await _send_all(session, load, model, list(zip(chains, rows, strict=True)), on_done)
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


def _needs_chat(request: ServeRequest) -> bool:
    return isinstance(request, Conversation) or (
        isinstance(request, TextRequest) and bool(request.parts or request.history)
    )


def _timing_of(request: BenchRequest | TextRequest) -> Timing:
    if isinstance(request, BenchRequest):
        return Timing(len(request.prompt_token_ids), request.output_len)
    return Timing(request.num_input_tokens or 0, request.output_len)


async def _send_all(
    session: aiohttp.ClientSession,
    load: ServeLoad,
    model: str,
    chains: Sequence[tuple[Sequence[BenchRequest | TextRequest], Sequence[Timing]]],
    on_done: Callable[[], object],
) -> None:
    gate = asyncio.Semaphore(load.max_concurrency or max(1, len(chains)))
    arrivals = load.arrivals()
    gaps = iter(arrivals.gaps(len(chains)) if arrivals is not None else ())
    begin = due = time.perf_counter()

    def finish(_: asyncio.Task[None]) -> None:
        gate.release()

    async with asyncio.TaskGroup() as group:
        for turns, timings in chains:
            if arrivals is not None:
                await asyncio.sleep(due - time.perf_counter())
            await gate.acquire()
            start = time.perf_counter() if arrivals is None else due
            work = _send_turns(session, load, model, turns, timings, start, begin, on_done)
            group.create_task(work).add_done_callback(finish)
            if arrivals is not None:
                due += next(gaps)


async def _send_turns(
    session: aiohttp.ClientSession,
    load: ServeLoad,
    model: str,
    turns: Sequence[BenchRequest | TextRequest],
    timings: Sequence[Timing],
    start: float,
    begin: float,
    on_done: Callable[[], object],
) -> None:
    """Send one request, or the turns of a conversation with what was said before each."""
    said: tuple[dict[str, Any], ...] = ()
    is_broken = False
    for turn, timing in zip(turns, timings, strict=True):
        if is_broken:
            timing.error, timing.total_s = "an earlier turn of its conversation failed", 0.0
        else:
            if isinstance(turn, TextRequest) and said:
                turn = dataclasses.replace(turn, history=said)
            timing.start_s = start - begin
            await _send(session, load, _body(load, model, turn), timing, start)
            is_broken = timing.error is not None
            if isinstance(turn, TextRequest):
                said = (*turn.messages(), {"role": "assistant", "content": timing.text})
            start = time.perf_counter()
        on_done()


def _body(load: ServeLoad, model: str, request: BenchRequest | TextRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.backend == "openai-chat":
        assert isinstance(request, TextRequest)
        body["messages"] = request.messages()
    else:
        body["prompt"] = request.prompt_token_ids if isinstance(request, BenchRequest) else request.prompt
    if request.output_len is not None:
        body["max_tokens"] = request.output_len
        body["ignore_eos"] = load.ignore_eos
    return {**body, **load.extra_body}


async def _send(
    session: aiohttp.ClientSession, load: ServeLoad, body: dict[str, Any], timing: Timing, start: float
) -> None:
    try:
        async with session.post(load.url(load.endpoint or ENDPOINTS[load.backend]), json=body) as response:
            if response.status == 200:
                timing.error = await _read_stream(response.content, timing, start)
            else:
                timing.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:300]}"
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, LookupError, TypeError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.total_s = time.perf_counter() - start


async def _read_stream(lines: aiohttp.StreamReader, timing: Timing, start: float) -> str | None:
    """Fill the timing from server-sent events; what went wrong, if anything did."""
    last, events, counted = start, 0, None
    pieces: list[str] = []
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            timing.num_output_tokens = events if counted is None else counted
            timing.text = "".join(pieces)
            return None
        event = json.loads(data)
        if not isinstance(event, dict) or event.get("error"):
            return f"error in the stream: {data[:300].decode(errors='replace')}"
        if event.get("usage"):
            counted = int(event["usage"].get("completion_tokens", 0))
            timing.num_input_tokens = timing.num_input_tokens or int(event["usage"].get("prompt_tokens") or 0)
        if event.get("choices") and (piece := _piece(event["choices"][0])) is not None:
            now = time.perf_counter()
            pieces.append(piece)
            if timing.first_token_s is None:
                timing.first_token_s = now - start
            else:
                timing.gaps_s.append(now - last)
            last, events = now, events + 1
    return "the stream broke off before its end"


def _piece(choice: Any) -> str | None:
    """Text of an event's choice; None for what says no token: a chat's first event names the role alone."""
    if not isinstance(choice, dict):
        raise ValueError(f"a choice is no JSON object: {choice!r:.100}")
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    text = delta.get("content")
    if text:
        return str(text)
    thought = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    return "" if thought else None


async def wait_until_ready(load: ServeLoad, timeout_s: float, on_wait: Callable[[], object] = lambda: None) -> None:
    """Wait until a server answers /health, or, where it has no such route, lists its models.

    Args:
        load: Names it.
        timeout_s: How long.
        on_wait: Called after each look that found nobody.

    Raises:
        QuireError: it does not answer in time.
    """
    end_s = time.monotonic() + timeout_s
    reason = ""
    async with aiohttp.ClientSession(headers=load.headers(), timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            for route in ("/health", "/v1/models"):
                try:
                    async with session.get(load.url(route)) as response:
                        if response.status == 200:
                            return
                        reason = f"HTTP {response.status}"
                        if response.status not in (404, 405):
                            break  # it has this route, and is not ready
                except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError) as error:
                    reason = f"{type(error).__name__}: {error}"
            if time.monotonic() + READY_LOOK_S > end_s:
                raise QuireError(f"no server was ready at {load.base_url} within {timeout_s:g} s ({reason})")
            on_wait()
            await asyncio.sleep(READY_LOOK_S)


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
        "num_other_length": sum(
            timing.num_output_tokens != timing.wanted_output_tokens
            for timing in good
            if timing.wanted_output_tokens is not None
        ),
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
