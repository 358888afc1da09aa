"""`RequestLog`: the requests in flight and the last ones that ended, each tenant's apart, for who asks about one.

Knows times and counts as an engine's client has them, and what a watched engine tells beside. Knows no text.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire_interfaces import FinishReason
from quire_interfaces.engine_watch import RequestRecord

__all__ = ["LoggedRequest", "RequestLog", "RequestTimes"]

MAX_FINISHED_PER_TENANT = 256
MAX_TENANTS = 256
"""Tenants whose finished requests are kept, the last ones that had any."""


class RequestTimes(Protocol):
    """What is read of a request (`quire_engine.RequestMetrics`). Times in seconds, 0.0 is "not yet" or "never"."""

    request_id: str
    """In the engine."""
    client_request_id: str | None
    tenant: str | None
    arrival_time_s: float
    scheduled_time_s: float
    first_token_time_s: float
    last_token_time_s: float
    finished_time_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    max_tokens: int
    n: int


@dataclass(slots=True, eq=False)
class LoggedRequest:
    """A request of the engine."""

    times: RequestTimes
    """Go on while it is in flight."""
    record: RequestRecord | None = None
    """What the engine told of it last, where somebody watched."""
    finish_reason: FinishReason | None = None
    added_at: float = field(default_factory=time.time)
    """When it came, as `time.time()`."""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


class RequestLog:
    """All requests in flight, and of each tenant the last ones that ended, so that no tenant's flood pushes out what
    others ask about."""

    def __init__(self) -> None:
        self._in_flight: dict[str, LoggedRequest] = {}
        self._finished: OrderedDict[str, OrderedDict[str, LoggedRequest]] = OrderedDict()
        """Tenant -> id -> request."""

    def added(self, times: RequestTimes) -> None:
        """A request was handed to the engine."""
        self._in_flight[times.request_id] = LoggedRequest(times)

    def rejected(self, times: RequestTimes) -> None:
        """The engine refused it."""
        self._in_flight.pop(times.request_id, None)

    def finished(self, times: RequestTimes, reason: FinishReason) -> None:
        """It has ended; the oldest one of its tenant may be forgotten for that."""
        request = self._in_flight.pop(times.request_id, None)
        if request is None:
            return
        request.finish_reason = reason
        tenant = times.tenant or ""
        of_tenant = self._finished.setdefault(tenant, OrderedDict())
        of_tenant[times.request_id] = request
        if len(of_tenant) > MAX_FINISHED_PER_TENANT:
            of_tenant.popitem(last=False)
        self._finished.move_to_end(tenant)
        if len(self._finished) > MAX_TENANTS:
            self._finished.popitem(last=False)

    def note(self, records: Sequence[RequestRecord]) -> None:
        """A watched engine told this."""
        for record in records:
            request = self._in_flight.get(record.request_id)
            if request is None:
                of_tenant = self._finished.get(record.tenant or "")
                request = None if of_tenant is None else of_tenant.get(record.request_id)
            if request is not None:
                request.record = record

    def find(self, name: str, tenant: str | None) -> list[LoggedRequest]:
        """The requests that the engine ran for one of a client, in the order in which they came.

        Args:
            name: The client's name of it, or the engine's of one of them.
            tenant: Whose they must be; None for anybody's.
        """
        found = [each for each in self.of(tenant) if name in (each.times.client_request_id, each.times.request_id)]
        return sorted(found, key=lambda each: each.times.arrival_time_s)

    def of(self, tenant: str | None) -> Iterator[LoggedRequest]:
        """All that are known of a tenant, or, for None, of all: those that ended first."""
        for name, requests in self._finished.items():
            if tenant is None or name == tenant:
                yield from requests.values()
        for request in self._in_flight.values():
            if tenant is None or (request.times.tenant or "") == tenant:
                yield request
