"""Times and counts of one request. Plain data; knows neither who counts nor who reads."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestMetrics"]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request, in `time.monotonic()` seconds as seen by its front; 0.0 is "not yet"."""

    request_id: str = ""
    """In the core."""
    client_request_id: str | None = None
    """This and the tenant are of `RequestOptions`."""
    arrival_time_s: float = 0.0
    scheduled_time_s: float = 0.0
    """First entered a row."""
    first_token_time_s: float = 0.0
    last_token_time_s: float = 0.0
    finished_time_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 0
    tenant: str | None = None
    n: int = 1
    """Completions asked for by the request this one belongs to."""
