"""What a request did beside the engine (calls of tools), noted for whoever traces requests. Standard library alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["SpanRecord", "current_spans", "span"]


@dataclass(slots=True)
class SpanRecord:
    """A piece of work, in `time.monotonic()` seconds."""

    name: str
    start_s: float
    end_s: float = 0.0
    """0.0 while it lasts."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    """Name of the exception that ended it."""


current_spans: ContextVar[list[SpanRecord] | None] = ContextVar("current_spans", default=None)
"""Where to note what this task does; None notes nothing."""


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, str]) -> Iterator[None]:
    """Note the work inside, if anybody traces this task.

    Args:
        name: In OpenTelemetry's words, e.g. "execute_tool search".
        attributes: Of OpenTelemetry's semantic conventions.
    """
    spans = current_spans.get()
    if spans is None:
        yield
        return
    record = SpanRecord(name, time.monotonic(), attributes=attributes)
    spans.append(record)
    try:
        yield
    except BaseException as error:
        record.error = type(error).__name__
        raise
    finally:
        record.end_s = time.monotonic()
