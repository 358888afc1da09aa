"""How the log of a program looks: lines for people, or one JSON object a line. Standard library alone.

Libraries log with `logging.getLogger(__name__)` and set nothing up; a program calls `configure_logging` once.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

from quire_interfaces import ConfigError

__all__ = [
    "LOG_FORMATS",
    "LOG_LEVELS",
    "JSONFormatter",
    "TextFormatter",
    "TraceIds",
    "configure_logging",
    "current_request_id",
    "current_trace",
]

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")
"""The request that this task works for; its id is added to what is logged meanwhile. Set by whoever takes requests."""


class TraceIds(NamedTuple):
    """Of a span, as W3C trace context writes them."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""


current_trace: ContextVar[TraceIds | None] = ContextVar("current_trace", default=None)
"""The span of the request that this task works for; JSON logs name it. None where nothing is traced."""

_CHATTY = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "mcp", "urllib3")
"""Loggers of libraries that tell each of their own requests at the level info."""

_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "request_id"}


class TextFormatter(logging.Formatter):
    """`2026-11-26 14:03:07 INFO [server] quire_server.serve: message (request ID)`.

    Further lines of a message are indented, so that no text of a client's can look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        request_id = _request_id(record)
        text = f"{time} {record.levelname} [{_process(record)}] {record.name}: {_message(record)}"
        if request_id:
            text += f" (request {request_id})"
        if exception := _exception(record):
            text += f"\n{exception}"
        return text.replace("\r", "\\r").replace("\n", "\n    ")


class JSONFormatter(logging.Formatter):
    """One object a line: time, level, process, logger, message, request_id, trace_id and span_id where there
    are such, the record's own fields (`extra`), and exception."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": _process(record),
            "logger": record.name,
            "message": _message(record),
        }
        if request_id := _request_id(record):
            told["request_id"] = request_id
        if (trace := current_trace.get()) is not None:
            told |= trace._asdict()
        told |= {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS}
        if exception := _exception(record):
            told["exception"] = exception
        return json.dumps(told, default=str)


def configure_logging(level: str = "info", form: str = "text") -> None:
    """Log everything of this process from `level` on to standard error, Python's warnings too.

    Args:
        level: One of `LOG_LEVELS`.
        form: One of `LOG_FORMATS`.

    Raises:
        ConfigError: another level or format.
    """
    for name, value, known in (("log_level", level, LOG_LEVELS), ("log_format", form, LOG_FORMATS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}", field=name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a full disk behind the log is no reason to print tracebacks
    logging.captureWarnings(True)
    warnings.formatwarning = _warning_in_one_line
    for logger in _CHATTY:
        logging.getLogger(logger).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)


def _warning_in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__}: {message} ({filename}:{lineno})"


def _message(record: logging.LogRecord) -> str:
    return record.getMessage().removeprefix("quire: ")  # so some begin, for programs that set up no log


def _process(record: logging.LogRecord) -> str:
    return "server" if record.processName in (None, "MainProcess") else str(record.processName)


def _request_id(record: logging.LogRecord) -> str:
    return str(getattr(record, "request_id", "") or current_request_id.get())


def _exception(record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    return record.exc_text or ""
