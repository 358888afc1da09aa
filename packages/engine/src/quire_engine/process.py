"""The parent's side of the engine process: start it, hear its output, notice its end, explain it.

Knows processes and pipes; knows no messages and no event loop.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire_engine.child import ChildSpec
from quire_engine.log_relay import LogReceiver

__all__ = ["EngineProcess", "explain_exit", "num_oom_kills", "signal_name"]

VMSTAT = Path("/proc/vmstat")
"""Where Linux counts what it kills for want of memory."""
TAIL_BYTES = 16384
TAIL_LINES = 15


class EngineProcess:
    """One engine process. `start` returns at once.

    Args:
        spec: What to run.
        forward_output: Log here what the child logs and prints.
        on_exit: Called once, from another thread, when the process has ended.
    """

    def __init__(self, spec: ChildSpec, *, forward_output: bool, on_exit: Callable[[EngineProcess], None]) -> None:
        self._spec = spec
        self._forward_output = forward_output
        self._on_exit = on_exit
        self._popen: subprocess.Popen[bytes] | None = None
        self._tail = ""
        self._has_exited = threading.Event()
        self.returncode: int | None = None
        """Exit status (negative: the signal's number); None while it runs."""

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start the process and send it its spec."""
        blob = msgspec.msgpack.encode(self._spec)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", "import sys; from quire_engine.child import main; sys.exit(main())"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent only, which then drains
        )
        threading.Thread(target=self._watch_output, name="quire-engine-output", daemon=True).start()
        threading.Thread(target=self._watch_exit, name="quire-engine-exit", daemon=True).start()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; the watcher says why
            self._popen.stdin.write(len(blob).to_bytes(8, "little") + blob)

    def kill(self) -> None:
        """End it now, with the processes that it started (compilers, for example)."""
        if self._popen is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)  # it leads a session of its own

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended, or was never there."""
        return self._popen is None or self._has_exited.wait(timeout_s)

    def last_lines(self) -> str:
        """The last lines it printed."""
        return "\n".join(self._tail.strip().splitlines()[-TAIL_LINES:])

    def explain(self) -> str:
        """Why it ended without saying anything, and what to do."""
        assert self.returncode is not None
        return explain_exit(self.returncode, self.last_lines())

    def _watch_output(self) -> None:
        assert self._popen is not None
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        receiver = LogReceiver(self._popen.pid, is_repeated=self._forward_output)
        while data := os.read(fd, 65536):
            self._tail = (self._tail + receiver.take(decoder.decode(data)))[-TAIL_BYTES:]
        self._tail += receiver.finish()
        self._popen.stdout.close()

    def _watch_exit(self) -> None:
        assert self._popen is not None
        returncode = self._popen.wait()
        self.returncode = returncode
        self._has_exited.set()
        self._on_exit(self)

    def close(self) -> None:
        """Let go of the lifeline after the process has ended (the output pipe closes itself at its end)."""
        if self._popen is not None and self._popen.stdin is not None:
            self._popen.stdin.close()


def num_oom_kills() -> int | None:
    """Number of processes that this system has killed since its start because memory ran out, in control groups, too;
    None where it does not say."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def signal_name(returncode: int) -> str | None:
    """Name of the signal that ended a process; None for one that ended by itself."""
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def explain_exit(returncode: int, last_lines: str) -> str:
    """Why an engine process ended without saying anything, and what to do."""
    if returncode >= 0:
        text = f"the engine process ended with exit status {returncode}"
        remedy = "Its last lines say more."
    else:
        text = f"the engine process was ended by {signal_name(returncode)}"
        remedy = {
            -signal.SIGKILL: "Most often the system ran out of memory: see the kernel log, and give the engine less "
            "to hold (smaller KV cache, fewer sequences, smaller dtype).",
            -signal.SIGSEGV: "A native library crashed: check its version, or choose another backend.",
            -signal.SIGILL: "A native library was built for another processor: choose another backend.",
        }.get(returncode, "Its last lines may say more.")
    lines = f"\nLast lines of the engine process:\n{last_lines}" if last_lines else " It printed nothing."
    return f"{text}. {remedy}{lines}"
