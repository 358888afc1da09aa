"""`DeviceTimer`: how long parts of a step take on the device, whose work goes on after the host has asked for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire_interfaces.platforms import platform_of_type

__all__ = ["DeviceTimer"]


class DeviceTimer:
    """Times of the parts of one step, by name. A device with events is asked for its own clock, and nothing waits for
    it until `seconds` is asked for.

    Args:
        device: On which the work is done, in the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._platform = platform_of_type(device.type)
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of what is asked for within."""
        if not self._platform.module:
            begin_s = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - begin_s)
            return
        new_event = self._platform.runtime().Event
        begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((name, begin, end))

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Name -> seconds; waits for the device to have done what was measured."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        self._events.clear()
        return self._seconds
