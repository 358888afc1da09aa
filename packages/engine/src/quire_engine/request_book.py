"""The requests in flight, as the synchronous front and every client keep them: who reads the outputs of each, its times
and counts, and its end.

Tells an `EngineListener` of all of it. Knows neither transport nor text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quire_engine.listener import EngineListener
from quire_engine.messages import AddRequest
from quire_engine.metrics import RequestMetrics
from quire_interfaces import EngineCoreOutput, FinishReason

__all__ = ["InFlight", "RequestBook"]

NUM_FINISH_TIMES = 64
"""Ends of requests whose rate says when the next place will be free."""

Reader = TypeVar("Reader")


@dataclass(slots=True)
class InFlight(Generic[Reader]):
    """A request that the engine core has."""

    request: AddRequest
    reader: Reader
    """What takes its outputs."""
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    """Output tokens so far, with which it could go on in another engine; kept only where the book `keeps_tokens`."""
    num_deaths: int = 0
    """Number of engine processes that died, one after the other, before it had another token."""
    num_tokens_at_death: int = -1
    """Number of output tokens when the last one of them died."""
    was_killed: bool = False
    """Whether SIGKILL ended the last of them, which mostly comes from outside."""
    num_trusted: int = 2
    """Number of deaths from which on it may be their cause."""
    is_adopted: bool = False
    """Whether another engine had it before."""

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens that stand before its first token; 0 once that is there."""
        return 0 if self.metrics.num_generation_tokens else self.metrics.num_prompt_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills engine processes: as many died before it had another token."""
        return self.num_deaths >= self.num_trusted and self.num_tokens_at_death == len(self.token_ids)

    def count_death(self, *, was_killed: bool = False, num_trusted: int = 2) -> None:
        """Count the death of the engine process that had it, by SIGKILL or otherwise; see `num_trusted`."""
        self.was_killed, self.num_trusted = was_killed, num_trusted
        is_repeated = self.num_tokens_at_death == len(self.token_ids)
        self.num_deaths = self.num_deaths + 1 if is_repeated else 1
        self.num_tokens_at_death = len(self.token_ids)


class RequestBook(Generic[Reader]):
    """Requests in flight by their id in the core.

    Args:
        listener: Hears of each request's arrival, tokens and end.
        keeps_tokens: Whether to keep output tokens, so that requests can be resumed in another engine.
    """

    def __init__(self, listener: EngineListener, *, keeps_tokens: bool = False) -> None:
        self._listener = listener
        self._keeps_tokens = keeps_tokens
        self._entries: dict[str, InFlight[Reader]] = {}
        self.num_waiting_tokens = 0
        """Number of prompt tokens of all requests that have no token yet."""
        self._finish_times_s: deque[float] = deque(maxlen=NUM_FINISH_TIMES)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[InFlight[Reader]]:
        """The entries of this moment, oldest first; they may be removed meanwhile."""
        return iter(list(self._entries.values()))

    def get(self, request_id: str) -> InFlight[Reader] | None:
        """The entry of a request in flight; None for every other."""
        return self._entries.get(request_id)

    def add(self, request: AddRequest, reader: Reader, *, n: int, num_prompt_tokens: int) -> InFlight[Reader]:
        """Note a request that was handed to the core.

        Args:
            request: As the core got it.
            reader: What takes its outputs.
            n: Completions asked for together with it.
            num_prompt_tokens: Tokens of the caller's prompt.
        """
        metrics = RequestMetrics(
            request_id=request.request_id,
            client_request_id=request.options.client_request_id,
            tenant=request.options.tenant,
            arrival_time_s=request.arrival_time_s or time.monotonic(),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=request.max_tokens,
            n=n,
        )
        entry = InFlight(request, reader, metrics)
        self.adopt(entry)
        self._listener.on_added(metrics)
        return entry

    def adopt(self, entry: InFlight[Reader]) -> None:
        """Note a request that goes on here, with what was counted of it before."""
        self._entries[entry.request.request_id] = entry
        self.num_waiting_tokens += entry.num_waiting_tokens

    def take(self, request_id: str) -> InFlight[Reader] | None:
        """Forget a request that goes on elsewhere, which is no end of it. Returns its entry; None for one that is not
        in flight."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.num_waiting_tokens -= entry.num_waiting_tokens
        return entry

    def start(self, request_ids: Iterable[str], time_s: float) -> None:
        """These requests entered a row at `time_s`: for the first time, or again after a preemption."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if entry.metrics.scheduled_time_s == 0.0:
                entry.metrics.scheduled_time_s = time_s
            else:
                entry.metrics.num_preemptions += 1

    def record(self, output: EngineCoreOutput, now_s: float) -> InFlight[Reader] | None:
        """Count what the core produced for a request, and forget the request if that was its end.

        Args:
            output: Of the core.
            now_s: The time, of `time.monotonic()`.

        Returns:
            The request's entry; None if it was aborted here while the step ran there.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        metrics = entry.metrics
        if output.new_token_ids:
            self._count_tokens(entry, output.new_token_ids, now_s)
        if output.num_cached_tokens > metrics.num_cached_tokens:
            metrics.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.finish(output.request_id, output.finish_reason, now_s)
        return entry

    def finish(self, request_id: str, reason: FinishReason, now_s: float | None = None) -> InFlight[Reader] | None:
        """Forget a request that has ended. Returns its entry; None for one that is not in flight."""
        entry = self.take(request_id)
        if entry is not None:
            entry.metrics.finished_time_s = time.monotonic() if now_s is None else now_s
            self._finish_times_s.append(entry.metrics.finished_time_s)
            self._listener.on_finished(entry.metrics, reason)
        return entry

    def reject(self, request_id: str) -> InFlight[Reader] | None:
        """Forget a request that the core refused. Returns its entry; None for one that is not in flight."""
        entry = self.take(request_id)
        if entry is not None:
            self._listener.on_rejected(entry.metrics)
        return entry

    def retry_after_s(self) -> float:
        """Seconds until a place may be free: the mean time between the last finished requests, at least 0.1."""
        times = self._finish_times_s
        if len(times) < 2:
            return 1.0
        return min(60.0, max(0.1, (times[-1] - times[0]) / (len(times) - 1)))

    def _count_tokens(self, entry: InFlight[Reader], token_ids: list[int], now_s: float) -> None:
        metrics = entry.metrics
        if metrics.num_generation_tokens == 0:
            self.num_waiting_tokens -= entry.num_waiting_tokens
            metrics.first_token_time_s = now_s
            self._listener.on_first_token(now_s - metrics.arrival_time_s)
        else:
            self._listener.on_tokens(now_s - metrics.last_token_time_s, len(token_ids))
        metrics.last_token_time_s = now_s
        metrics.num_generation_tokens += len(token_ids)
        if self._keeps_tokens:
            entry.token_ids.extend(token_ids)
