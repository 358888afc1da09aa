"""`quire bench startup`: from a command to a server's first token, with empty caches and again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire_bench.serving_results import percentile
from quire_interfaces import ConfigError, QuireError

__all__ = ["StartTimes", "measure_start", "startup_results"]

LOOK_S = 0.02
STOP_TIMEOUT_S = 30.0
CACHES = ("PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Variables that name folders of compiled files. The hub's cache is elsewhere: nothing is downloaded again."""


class StartTimes(NamedTuple):
    """Seconds from the start of the process."""

    ready_s: float
    """/health answers."""
    first_token_s: float
    """The first token of a short prompt has come."""


def serve_command(text: str | None, model: str | None, flags: Sequence[str], port: int) -> list[str]:
    """The command to start; in the one that was given, {port} and {model} stand for these.

    Raises:
        ConfigError: it names no {port}, or cannot be read.
    """
    if text is None:
        program = [sys.executable, "-m", "quire_server.cli", "serve", *([model] if model is not None else [])]
        return [*program, "--port", str(port), "--host", "127.0.0.1", "--response-store", "none", *flags]
    if "{port}" not in text:
        raise ConfigError(f"--serve-cmd must say {{port}} where its port stands, got {text!r}", field="serve_cmd")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--serve-cmd cannot be read ({error}): {text!r}", field="serve_cmd") from None
    return [word.replace("{port}", str(port)).replace("{model}", model or "") for word in words] + list(flags)


def measure_start(make_command: Callable[[int], Sequence[str]], *, is_cold: bool, timeout_s: float) -> StartTimes:
    """Start a server, wait for its first token, and stop it.

    Args:
        make_command: Of a free port.
        is_cold: Give it empty caches.
        timeout_s: For all of it.

    Raises:
        QuireError: it ends, or is not ready in time; the message has its last words.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quire-start-") as folder, tempfile.TemporaryFile() as said:
        environment = {**os.environ, **({name: str(Path(folder) / name) for name in CACHES} if is_cold else {})}
        if is_cold:
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            # Its default lies below the cache's folder, which is another one now.
            environment.setdefault(
                "HF_HOME", str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
            )
        begin_s = time.perf_counter()
        try:
            process = subprocess.Popen(
                list(make_command(port)), env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise QuireError(f"the server cannot be started: {error.strerror}") from None
        try:
            return _times(process, f"http://127.0.0.1:{port}", begin_s, timeout_s, said)
        finally:
            _stop(process)


def _times(process: subprocess.Popen[bytes], url: str, begin_s: float, timeout_s: float, said: Any) -> StartTimes:
    while not _answers(f"{url}/health"):
        if process.poll() is not None:
            raise QuireError(f"the server ended with status {process.returncode} before it was ready:\n{_last(said)}")
        if time.perf_counter() - begin_s > timeout_s:
            raise QuireError(f"the server was not ready within {timeout_s:g} s:\n{_last(said)}")
        time.sleep(LOOK_S)
    ready_s = time.perf_counter() - begin_s
    body = b'{"prompt": "Hello", "max_tokens": 1, "temperature": 0}'
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            response.read()
    except OSError as error:
        raise QuireError(f"the server was ready and gave no token ({error}):\n{_last(said)}") from None
    return StartTimes(ready_s, time.perf_counter() - begin_s)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _last(said: Any) -> str:
    said.seek(0)
    return "\n".join(said.read().decode(errors="replace").splitlines()[-10:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def startup_results(cold: Sequence[StartTimes], warm: Sequence[StartTimes]) -> dict[str, Any]:
    """Figures under vLLM's names, in seconds; times to the first token beside them."""
    result: dict[str, Any] = {}
    named: Mapping[str, Sequence[StartTimes]] = {"cold": cold, "warm": warm}
    for name, times in named.items():
        if not times:
            continue
        ready, first = [each.ready_s for each in times], [each.first_token_s for each in times]
        result |= {
            f"avg_{name}_startup_time": sum(ready) / len(ready),
            f"{name}_startup_times": ready,
            f"{name}_startup_percentiles": {f"{point}": percentile(ready, point) for point in (10, 25, 50, 75, 90, 99)},
            f"avg_{name}_first_token_time": sum(first) / len(first),
            f"{name}_first_token_times": first,
        }
    return result
