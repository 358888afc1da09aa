"""A line in the log every few seconds of work: tokens a second, requests, and how full the KV cache is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire_interfaces import SchedulerStats

__all__ = ["ThroughputLog"]

_logger = logging.getLogger("quire.stats")


class ThroughputLog:
    """Tells what happened since it was last asked to, and nothing where nothing did.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = self._former_s = clock()
        self._former = SchedulerStats()

    def tell(self, stats: SchedulerStats) -> None:
        """Log the time since the last call, unless the engine was idle all along.

        Args:
            stats: The engine's statistics of now.
        """
        now, former = self._clock(), self._former
        seconds, self._former_s, self._former = max(now - self._former_s, 1e-9), now, stats
        num_prompt = stats.num_prompt_tokens_total - former.num_prompt_tokens_total
        num_generation = stats.num_generation_tokens_total - former.num_generation_tokens_total
        if not (num_prompt or num_generation or stats.num_running or stats.num_waiting):
            return
        told: dict[str, float] = {
            "prompt_tokens_per_s": round(num_prompt / seconds, 1),
            "generation_tokens_per_s": round(num_generation / seconds, 1),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": round(stats.kv_cache_usage, 4),
        }
        text = (
            "prompt: {prompt_tokens_per_s:.1f} tokens/s, generation: {generation_tokens_per_s:.1f} tokens/s, running: "
            "{running} requests, waiting: {waiting} requests, KV cache usage: {kv_cache_usage:.1%}"
        )
        num_queries = stats.prefix_cache_query_tokens_total - former.prefix_cache_query_tokens_total
        if num_queries:
            num_hits = stats.prefix_cache_hit_tokens_total - former.prefix_cache_hit_tokens_total
            told["prefix_cache_hit_rate"] = round(num_hits / num_queries, 4)
            text += ", prefix cache hit rate: {prefix_cache_hit_rate:.1%}"
        _logger.info(text.format(**told), extra=told)

    def tell_totals(self, stats: SchedulerStats, num_requests: int) -> None:
        """Log what was done since the start.

        Args:
            stats: The engine's statistics of now.
            num_requests: Requests that ended since then.
        """
        told = {
            "uptime_s": round(self._clock() - self._start_s, 1),
            "requests": num_requests,
            "prompt_tokens": stats.num_prompt_tokens_total,
            "generation_tokens": stats.num_generation_tokens_total,
        }
        text = (
            "served for {uptime_s:.0f} s: {requests} requests, {prompt_tokens} prompt tokens, {generation_tokens} "
            "generation tokens"
        )
        _logger.info(text.format(**told), extra=told)
