"""Who wants to know what happens, for metrics. Called on the client's event loop, so it must be quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_engine.metrics import RequestMetrics
from quire_interfaces import FinishReason, SchedulerStats
from quire_interfaces.engine_watch import RequestRecord

__all__ = ["EngineListener", "NullListener"]


class EngineListener(Protocol):
    """Hears of steps and requests as their outputs reach the client. Times are seconds."""

    def on_step(self, num_tokens: int, stats: SchedulerStats | None) -> None:
        """A step was collected (`num_tokens` computed, 0 when only statistics came); stats come from time to time."""

    def on_added(self, metrics: RequestMetrics) -> None:
        """A request was handed to the engine, in the task of whoever reads its outputs. `metrics` is updated until it
        ends."""

    def on_first_token(self, time_to_first_token_s: float) -> None:
        """A request's first token arrived."""

    def on_tokens(self, interval_s: float, num_tokens: int) -> None:
        """Further tokens of a request arrived, `interval_s` after the ones before."""

    def on_finished(self, metrics: RequestMetrics, reason: FinishReason) -> None:
        """A request ended, in whatever way."""

    def on_rejected(self, metrics: RequestMetrics) -> None:
        """The engine refused a request."""

    def on_watched(self, records: Sequence[RequestRecord]) -> None:
        """Somebody watches the engine, and was told this of requests."""

    def on_restart(self, reason: str) -> None:
        """The engine's process ended and is started again: for a signal (its name), by itself ("exit"), or for a
        failure that it told ("failure")."""

    def on_stall(self) -> None:
        """The engine has taken no step for `stall_timeout_s` though it has requests."""

    def on_sleep(self, level: int | None) -> None:
        """The engine was put to sleep at this level, or woken (None)."""


class NullListener:
    """An `EngineListener` that does nothing."""

    def on_step(self, num_tokens: int, stats: SchedulerStats | None) -> None: ...

    def on_added(self, metrics: RequestMetrics) -> None: ...

    def on_first_token(self, time_to_first_token_s: float) -> None: ...

    def on_tokens(self, interval_s: float, num_tokens: int) -> None: ...

    def on_finished(self, metrics: RequestMetrics, reason: FinishReason) -> None: ...

    def on_rejected(self, metrics: RequestMetrics) -> None: ...

    def on_watched(self, records: Sequence[RequestRecord]) -> None: ...

    def on_restart(self, reason: str) -> None: ...

    def on_stall(self) -> None: ...

    def on_sleep(self, level: int | None) -> None: ...
