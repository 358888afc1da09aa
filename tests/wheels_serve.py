"""Starts the installed server, asks the demo model one question and stops it: what `nox -s wheels` runs in each
environment. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

QUESTION, ANSWER = "What is 27 + 35?", "62"
START_LIMIT_S = 300


def main() -> None:
    """Serve, ask, stop; print what was seen.

    Raises:
        AssertionError: The server did not start, answered something else, or left with an error.
    """
    port = sys.argv[1]
    program = Path(sysconfig.get_path("scripts")) / "quire"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = str(program.parent)  # no compiler, no other Python
    started = time.monotonic()
    server = subprocess.Popen([str(program), "serve", "--port", port], env=environment, start_new_session=True)
    try:
        wait_until_healthy(server, port)
        start_s = time.monotonic() - started
        answer = ask(port)
        assert ANSWER in answer, answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    torch = importlib.metadata.version("torch")
    print(f"Python {sys.version.split()[0]}, torch {torch}: {QUESTION} {answer} (ready after {start_s:.1f} s)")


def wait_until_healthy(server: subprocess.Popen[bytes], port: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        assert server.poll() is None, f"the server left with status {server.returncode}"
        assert time.monotonic() < deadline, f"not healthy after {START_LIMIT_S} s"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)


def ask(port: str) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 50}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
