"""Times of calls on a GPU: the device's own events around replays of a captured graph, in which no launch waits for
Python. What cannot be captured is timed call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["event_samples"]

_ROUNDS = 16
"""Most times that all calls are in one graph."""


def event_samples(
    calls: list[Callable[[], Any]], device: torch.device, repeats: int, sample_s: float
) -> tuple[list[float], str]:
    """Seconds of a call on a CUDA or ROCm device, `repeats` times the mean of as many calls as take about `sample_s`.

    Args:
        calls: The same work on memory of its own each; they take turns.

    Returns:
        The seconds; and "graph" where replays were timed, "calls" where capturing failed.
    """
    with torch.cuda.device(device):
        for call in calls:  # whatever is compiled or allocated by the first call
            call()
        torch.cuda.synchronize()
        once_s = _seconds_of(calls[0], 1)
        rounds = max(1, min(_ROUNDS, round(1e-3 / max(once_s * len(calls), 1e-7))))
        graph = _captured(calls * rounds)
        run: Callable[[], Any] = graph.replay if graph is not None else lambda: [call() for call in calls * rounds]
        size = len(calls) * rounds
        count = max(1, min(1000, round(sample_s / max(_seconds_of(run, 1), 1e-7))))
        samples = [_seconds_of(run, count) / size for _ in range(repeats)]
    return samples, "calls" if graph is None else "graph"


def _seconds_of(run: Callable[[], Any], count: int) -> float:
    """Seconds of a run, the mean of some, by the device's events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _captured(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph | None:
    """A graph of these calls, replayed once; None where something in them cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:  # it asks the device for something, or launches on another stream
        torch.cuda.synchronize()
        return None
    return graph
