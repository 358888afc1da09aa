"""Limits of API keys: requests and tokens per minute, tokens per day.

Tokens are known when a request ends, so that they are taken then: a bucket may owe some, and the next request waits
until it is even again. What runs is never cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from quire_interfaces import OverloadedError
from quire_server.callers import Caller, KeyLimits
from quire_server.usage import Usage, UsageBook

__all__ = ["RATE_LIMIT_HEADERS", "RateLimitError", "RateLimiter", "TokenBucket"]

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{name}" for name in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""What is left of the limits per minute, in the headers of OpenAI's API."""


class RateLimitError(OverloadedError):
    """A limit of the caller's key is used up: 429, with the seconds until it is not."""

    code = "rate_limit_exceeded"


@dataclass(slots=True)
class TokenBucket:
    """So many a minute, and as many at once (Turner, "New directions in communications", 1986).

    Args:
        per_minute: What flows in during a minute, and the most that it holds.
        time_s: Now, of any clock that only goes on.
    """

    per_minute: int
    time_s: float
    level: float = 0.0
    """What could be taken at `time_s`; negative where more was taken."""

    def __post_init__(self) -> None:
        self.level = float(self.per_minute)

    def flow(self, time_s: float) -> None:
        """Let in what belongs to the time that passed."""
        self.level = min(self.per_minute, self.level + (time_s - self.time_s) * self.per_minute / 60)
        self.time_s = time_s

    def seconds_until(self, level: float) -> float:
        """From `time_s` on; 0 if it holds as much."""
        return max(0.0, (level - self.level) * 60 / self.per_minute)


class RateLimiter:
    """Admits requests of callers whose keys have limits.

    Args:
        usage: Counts what they use; this object hears of it (`on_count`).
        limits: Tenant -> its limits.
        clock: Seconds, for buckets.
    """

    def __init__(
        self, usage: UsageBook, limits: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usage, self._clock = usage, clock
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}
        self.set_limits(limits)
        usage.on_count = self._take_tokens

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """Hold tenants to other limits; what those whose limits stay have used is remembered."""
        now_s = self._clock()
        for buckets, field in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            for tenant, each in limits.items():
                per_minute, former = getattr(each, field), buckets.get(tenant)
                if not per_minute:
                    buckets.pop(tenant, None)
                elif former is None or former.per_minute != per_minute:
                    buckets[tenant] = TokenBucket(per_minute, now_s)

    def admit(self, caller: Caller) -> None:
        """Take a request from the caller's bucket.

        Raises:
            RateLimitError: a limit is used up; nothing was taken.
        """
        limits = caller.limits
        if limits.tokens_per_day:
            used = self._usage.of_day(caller.tenant, self._usage.today).total_tokens
            if used >= limits.tokens_per_day:
                text = f"{used} of {limits.tokens_per_day} tokens of today (UTC) are used"
                raise _error(text, self._usage.seconds_left_today)
        tokens = self._flowing(self._tokens, caller)
        if tokens is not None and tokens.level < 1:
            raise _error(f"{limits.tokens_per_minute} tokens per minute are used up", tokens.seconds_until(1))
        requests = self._flowing(self._requests, caller)
        if requests is not None:
            if requests.level < 1:
                text = f"{limits.requests_per_minute} requests per minute are used up"
                raise _error(text, requests.seconds_until(1))
            requests.level -= 1

    def headers(self, caller: Caller) -> dict[str, str]:
        """Values of `RATE_LIMIT_HEADERS`, of the limits that the caller has."""
        headers = {}
        for name, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            bucket = self._flowing(buckets, caller)
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def remaining(self, caller: Caller) -> dict[str, int]:
        """Limit (a field of `KeyLimits`) -> how much of it is left, of those that are set."""
        limits, left = caller.limits, {}
        for name, buckets in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            bucket = self._flowing(buckets, caller)
            if bucket is not None:
                left[name] = max(0, int(bucket.level))
        if limits.tokens_per_day:
            used = self._usage.of_day(caller.tenant, self._usage.today).total_tokens
            left["tokens_per_day"] = max(0, limits.tokens_per_day - used)
        assert set(left) == {field.name for field in fields(limits) if getattr(limits, field.name)}
        return left

    def _flowing(self, buckets: Mapping[str, TokenBucket], caller: Caller) -> TokenBucket | None:
        bucket = buckets.get(caller.tenant)
        if bucket is not None:
            bucket.flow(self._clock())
        return bucket

    def _take_tokens(self, tenant: str, usage: Usage) -> None:
        bucket = self._tokens.get(tenant)
        if bucket is not None:
            bucket.flow(self._clock())
            bucket.level -= usage.total_tokens


def _error(used_up: str, retry_after_s: float) -> RateLimitError:
    return RateLimitError(
        f"a limit of your key is reached: {used_up}; try again in {max(1, round(retry_after_s))} s",
        retry_after_s=retry_after_s,
    )
