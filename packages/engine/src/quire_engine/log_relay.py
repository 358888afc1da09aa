"""Log records of the engine process, on their way to the process that started it.

The engine process has no log of its own: it writes each record as one line of JSON behind a mark (RFC 7464's record
separator), and its parent logs it with its own handlers, so that one setting says how everything looks. What native
libraries print has no mark and is logged line by line, by the logger "quire_engine.output". Knows no process.
"""

from __future__ import annotations

import json
import logging
import sys

__all__ = ["LogReceiver", "send_logs"]

MARK = "\x1e"
MAX_LINE_CHARS = 1 << 20
"""A longer line is told in pieces."""

_output = logging.getLogger("quire_engine.output")


class _SendingHandler(logging.Handler):
    """Writes records on standard error for a `LogReceiver`."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"name": record.name, "level": record.levelno, "time": record.created}
        try:
            fields["message"] = record.getMessage()
            if record.exc_info:
                fields["exception"] = logging.Formatter().formatException(record.exc_info)
            sys.stderr.write(f"{MARK}{json.dumps(fields)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def send_logs(level: int) -> None:
    """Send everything that this process logs from `level` on, and Python's warnings, to its parent."""
    logging.raiseExceptions = False  # a parent that is gone is no reason to print tracebacks
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [_SendingHandler()]
    root.setLevel(level)


class LogReceiver:
    """Takes what an engine process prints, and logs it here.

    Args:
        pid: The process.
        is_repeated: Whether to log it; else it is only made readable.
    """

    def __init__(self, pid: int, *, is_repeated: bool) -> None:
        self._pid = pid
        self._is_repeated = is_repeated
        self._rest = ""

    def take(self, text: str) -> str:
        """The lines that `text` completes, as people read them; the rest waits for more."""
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > MAX_LINE_CHARS:
            lines.append(self._rest)
            self._rest = ""
        return "".join(self._take_line(line) + "\n" for line in lines)

    def finish(self) -> str:
        """The process has ended: what is left of its last line."""
        rest, self._rest = self._rest, ""
        return self._take_line(rest) if rest else ""

    def _take_line(self, line: str) -> str:
        before, mark, data = line.partition(MARK)
        record = _record(data) if mark else None
        if record is None:
            return self._take_output(line)
        if before:  # of a library that does not end its lines
            self._take_output(before)
        self._log(record)
        return f"{record.levelname} {record.name}: {record.getMessage()}"

    def _take_output(self, line: str) -> str:
        line = line.removesuffix("\r").rpartition("\r")[2]  # of a progress bar, the last state
        if line.strip() and self._is_repeated:
            if logging.getLogger().handlers:
                self._log(_output.makeRecord(_output.name, logging.INFO, "", 0, line.rstrip(), (), None))
            else:  # a program that has set up no logging sees what it would see without this process between
                self._write(line)
        return line

    def _log(self, record: logging.LogRecord) -> None:
        record.process, record.processName = self._pid, "engine"
        logger = logging.getLogger(record.name)
        if self._is_repeated and logger.isEnabledFor(record.levelno):
            logger.handle(record)

    def _write(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # closed or gone: the child must not block on it
            self._is_repeated = False


def _record(data: str) -> logging.LogRecord | None:
    """The record in a marked line; None where something else was printed into it."""
    try:
        record = json.loads(data)
        level = int(record["level"])
        time_s = float(record["time"])
        fields = {"name": str(record["name"]), "levelno": level, "levelname": logging.getLevelName(level)}
        fields |= {"msg": str(record["message"]), "created": time_s, "msecs": time_s % 1 * 1000}
        if "exception" in record:
            fields["exc_text"] = str(record["exception"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return logging.makeLogRecord(fields)
