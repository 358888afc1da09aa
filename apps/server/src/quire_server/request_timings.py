"""Times of one request in its answer (--enable-per-request-metrics), in vLLM's names."""

from __future__ import annotations

import msgspec

from quire_engine import RequestOutput

__all__ = ["RequestTimings", "request_timings"]


class RequestTimings(msgspec.Struct, kw_only=True):
    """Milliseconds of a request's phases; None where there is nothing to tell."""

    time_to_first_token_ms: float | None = None
    """From its first step to its first token."""
    generation_time_ms: float | None = None
    """From its first token to its last one."""
    queue_time_ms: float | None = None
    """From its arrival to its first step."""
    mean_itl_ms: float | None = None
    """Between two tokens."""
    tokens_per_second: float | None = None
    """From its first step on."""


def request_timings(outputs: list[RequestOutput]) -> RequestTimings | None:
    """Times of the one completion of the one prompt of a request; None where there are several.

    Args:
        outputs: What came last of each prompt.
    """
    if len(outputs) != 1 or len(outputs[0].metrics) != 1:
        return None
    (times,) = outputs[0].metrics
    if not times.scheduled_time_s:
        return RequestTimings()
    timings = RequestTimings(queue_time_ms=(times.scheduled_time_s - times.arrival_time_s) * 1e3)
    num_tokens = times.num_generation_tokens
    if num_tokens:
        generation_s = times.last_token_time_s - times.first_token_time_s
        whole_s = times.last_token_time_s - times.scheduled_time_s
        timings.time_to_first_token_ms = (times.first_token_time_s - times.scheduled_time_s) * 1e3
        timings.generation_time_ms = generation_s * 1e3
        timings.mean_itl_ms = generation_s * 1e3 / (num_tokens - 1) if num_tokens > 1 else None
        timings.tokens_per_second = num_tokens / whole_s if whole_s > 0 else None
    return timings
