"""Figures of a run under vLLM's names (`vllm bench serve --save-result`), for scripts that read those."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire_bench.serve import Timing
from quire_interfaces import ConfigError

__all__ = ["METRICS", "is_good", "parse_goals", "percentile", "serving_results"]

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after it, inter-token latency, end-to-end latency."""


def percentile(values: Sequence[float], point: float) -> float:
    """By linear interpolation between ranks; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * point / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Goals of a request in milliseconds, given as `ttft:200 tpot:50`.

    Raises:
        ConfigError: one is something else.
    """
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in ("ttft", "tpot", "e2el") or not number > 0:
            raise ConfigError(
                f"--goodput takes ttft:MS, tpot:MS and e2el:MS, for example ttft:200, got {text!r}", field="goodput"
            )
        goals[name] = number
    return goals


def per_token_s(timing: Timing) -> float | None:
    """Seconds per output token after the first; None with fewer than two."""
    if timing.total_s is None or timing.first_token_s is None or timing.num_output_tokens < 2:
        return None
    return (timing.total_s - timing.first_token_s) / (timing.num_output_tokens - 1)


def is_good(timing: Timing, goals: Mapping[str, float]) -> bool:
    """Whether a request kept to all goals. One with a single token has no time per token, and keeps to that."""
    if timing.error is not None:
        return False
    seconds = {"ttft": timing.first_token_s, "tpot": per_token_s(timing), "e2el": timing.total_s}
    taken = [(seconds[name], limit) for name, limit in goals.items()]
    return all(each is None or 1000 * each <= limit for each, limit in taken)


def serving_results(
    timings: Sequence[Timing],
    wall_s: float,
    *,
    points: Sequence[float] = (99.0,),
    metrics: Sequence[str] = METRICS,
    goals: Mapping[str, float] | None = None,
    detailed: bool = False,
) -> dict[str, Any]:
    """Counts, throughputs, and of each metric mean, median, standard deviation and percentiles in milliseconds.

    Args:
        timings: One for each request.
        wall_s: From the first sending to the last end.
        points: Percentiles to tell.
        metrics: Of `METRICS`.
        goals: For `request_goodput`.
        detailed: Also each request's own figures.
    """
    good = [each for each in timings if each.error is None]
    num_input, num_output = sum(each.num_input_tokens for each in good), sum(each.num_output_tokens for each in good)
    result: dict[str, Any] = {
        "duration": wall_s,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / wall_s,
        "request_goodput": sum(is_good(each, goals) for each in good) / wall_s if goals else None,
        "output_throughput": num_output / wall_s,
        "total_token_throughput": (num_input + num_output) / wall_s,
        "max_concurrent_requests": _most_at_once(good),
        "mean_concurrent_requests": sum(each.total_s or 0.0 for each in good) / wall_s,
        "max_output_tokens_per_s": _most_tokens_in_a_second(good),
    }
    values = {
        "ttft": [each.first_token_s for each in good if each.first_token_s is not None],
        "tpot": [each for timing in good if (each := per_token_s(timing)) is not None],
        "itl": [gap for each in good for gap in each.gaps_s],
        "e2el": [each.total_s for each in good if each.total_s is not None],
    }
    for name in metrics:
        milliseconds = [1000 * each for each in values[name]]
        mean = sum(milliseconds) / len(milliseconds) if milliseconds else 0.0
        deviation = math.sqrt(sum((each - mean) ** 2 for each in milliseconds) / max(1, len(milliseconds)))
        result |= {
            f"mean_{name}_ms": mean,
            f"median_{name}_ms": percentile(milliseconds, 50),
            f"std_{name}_ms": deviation,
        }
        result |= {f"p{point:g}_{name}_ms": percentile(milliseconds, point) for point in points}
    if detailed:
        result |= {
            "input_lens": [each.num_input_tokens for each in timings],
            "output_lens": [each.num_output_tokens for each in timings],
            "ttfts": [each.first_token_s or 0.0 for each in timings],
            "itls": [each.gaps_s for each in timings],
            "start_times": [each.start_s for each in timings],
            "generated_texts": [each.text for each in timings],
            "errors": [each.error or "" for each in timings],
        }
    return result


def _most_at_once(timings: Sequence[Timing]) -> int:
    changes = [(each.start_s, 1) for each in timings]
    changes += [(each.start_s + each.total_s, -1) for each in timings if each.total_s is not None]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def _most_tokens_in_a_second(timings: Sequence[Timing]) -> float:
    """Events with tokens in the fullest second, counted from the start."""
    seconds: dict[int, int] = {}
    for each in timings:
        moment = each.start_s + (each.first_token_s or 0.0)
        for gap in (0.0, *each.gaps_s) if each.first_token_s is not None else ():
            moment += gap
            seconds[int(moment)] = seconds.get(int(moment), 0) + 1
    return float(max(seconds.values(), default=0))
