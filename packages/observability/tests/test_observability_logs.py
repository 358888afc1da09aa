"""How the log looks, as text and as JSON, and the lines about throughput."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from quire_interfaces import ConfigError, SchedulerStats
from quire_observability import ThroughputLog, configure_logging, current_request_id

PROGRAM = """
import logging, sys, warnings
from quire_observability import configure_logging, current_request_id
configure_logging(*sys.argv[1:])
log = logging.getLogger("quire_x")
log.info("first\\nforged")
log.debug("details")
log.warning("quire: begins with the program's name", extra={"status": 200, "what": object})
warnings.warn("old")
logging.getLogger("httpx").info("a request of a library")
current_request_id.set("req-1")
try:
    raise ValueError("inner")
except ValueError:
    log.exception("it failed")
log.error("other", extra={"request_id": "req-2"})
record = log.makeRecord("quire_y", logging.INFO, "", 0, "from the engine", (), None)
record.processName = "engine"
if log.isEnabledFor(record.levelno):
    log.handle(record)
"""


def run(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text() -> None:
    lines = run("info", "text")
    times = [line[:19] for line in lines if not line.startswith("    ")]
    assert all(time[4] == time[7] == "-" and time[13] == time[16] == ":" for time in times)
    assert [line[20:] if not line.startswith("    ") else line for line in lines] == [
        "INFO [server] quire_x: first",
        "    forged",
        "WARNING [server] quire_x: begins with the program's name",
        "WARNING [server] py.warnings: UserWarning: old (<string>:9)",
        "ERROR [server] quire_x: it failed (request req-1)",
        "    Traceback (most recent call last):",
        '      File "<string>", line 13, in <module>',
        "    ValueError: inner",
        "ERROR [server] quire_x: other (request req-2)",
        "INFO [engine] quire_y: from the engine (request req-1)",
    ]


def test_json() -> None:
    records = [json.loads(line) for line in run("info", "json")]
    assert [(each["level"], each["process"], each["logger"], each["message"]) for each in records] == [
        ("info", "server", "quire_x", "first\nforged"),
        ("warning", "server", "quire_x", "begins with the program's name"),
        ("warning", "server", "py.warnings", "UserWarning: old (<string>:9)"),
        ("error", "server", "quire_x", "it failed"),
        ("error", "server", "quire_x", "other"),
        ("info", "engine", "quire_y", "from the engine"),
    ]
    first, warning, _, failed, other, _ = records
    assert set(first) == {"time", "level", "process", "logger", "message"}
    assert first["time"].endswith("+00:00")
    assert (warning["status"], warning["what"]) == (200, "<class 'object'>")
    assert failed["request_id"] == "req-1"
    assert failed["exception"].endswith("ValueError: inner")
    assert other["request_id"] == "req-2"


def test_levels() -> None:
    assert [line.split(" ")[2] for line in run("error") if line[0] != " "] == ["ERROR", "ERROR"]
    debug = run("debug")
    assert any("details" in line for line in debug)
    assert any("a request of a library" in line for line in debug)


@pytest.mark.parametrize(("arguments", "field"), [(("loud",), "log_level"), (("info", "xml"), "log_format")])
def test_unknown_levels_and_formats_are_refused(arguments: tuple[str, ...], field: str) -> None:
    former = logging.getLogger().handlers[:]
    with pytest.raises(ConfigError, match=f"{field} must be one of"):
        configure_logging(*arguments)
    assert logging.getLogger().handlers == former
    assert current_request_id.get() == ""


def test_a_line_for_each_interval_with_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    log = ThroughputLog(lambda: now)
    log.tell(SchedulerStats())
    assert caplog.messages == [], "nothing happened yet"
    now = 110.0
    busy = SchedulerStats(
        num_prompt_tokens_total=1000,
        num_generation_tokens_total=255,
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        prefix_cache_query_tokens_total=1000,
        prefix_cache_hit_tokens_total=600,
    )
    log.tell(busy)
    assert caplog.messages == [
        "prompt: 100.0 tokens/s, generation: 25.5 tokens/s, running: 3 requests, waiting: 2 requests, "
        "KV cache usage: 25.0%, prefix cache hit rate: 60.0%"
    ]
    (record,) = caplog.records
    assert (record.prompt_tokens_per_s, record.prefix_cache_hit_rate) == (100.0, 0.6)  # type: ignore[attr-defined]
    now = 115.0
    log.tell(busy)
    assert caplog.messages[1].startswith("prompt: 0.0 tokens/s, generation: 0.0 tokens/s, running: 3 requests")
    assert "hit rate" not in caplog.messages[1]
    busy.num_running = busy.num_waiting = 0
    log.tell(busy)
    assert len(caplog.messages) == 2, "idle"
    now = 225.0
    log.tell_totals(busy, 7)
    assert caplog.messages[2] == "served for 125 s: 7 requests, 1000 prompt tokens, 255 generation tokens"
