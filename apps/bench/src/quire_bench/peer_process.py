"""A running engine of a comparison: a process that is stopped whenever it is not being measured.

Knows the lines of JSON that `programs/program.py` speaks; knows no particular engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire_bench.peers import Engine, PeerOptions, find_peers
from quire_bench.workload import BenchRequest, ClientRequests, ImageRequest, RecordingRequest
from quire_interfaces import ConfigError, QuireError

__all__ = ["PeerProcess", "engine_settings", "load_peer", "peer_environment", "start_program"]

TAIL_LINES = 8
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
END_S = 20.0
"""How long a program may take to end by itself when its input ends."""
AnyRequests = Sequence[BenchRequest] | Sequence[ImageRequest] | Sequence[ClientRequests] | Sequence[RecordingRequest]
SLICE_S = 0.05
"""How long an engine runs between two looks at the machine."""


class PeerProcess:
    """One engine, loaded and stopped (SIGSTOP) until `run`. Use it as a context manager, or call `close`.

    Args:
        engine: What to start.
        settings: For the program; see `programs/program.py`.
        timeout_s: Bound on the start and on each run.

    Attributes:
        first_token_s: From the start of the process to its first token.
        version: What the engine says it is.

    Raises:
        QuireError: it did not start, with its own last lines, or not in time.
    """

    def __init__(self, engine: Engine, settings: dict[str, Any], *, timeout_s: float) -> None:
        self.name = engine.name
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile("w+b", prefix="quire-bench-")  # noqa: SIM115 - closed with the process
        self._buffer = b""
        self._is_gone = False
        settings = {**settings, "file": engine.file, "executable": engine.executable}
        start = time.perf_counter()
        self._process = start_program(
            engine.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=peer_environment(settings["num_threads"], engine.command[0]),
            start_new_session=True,  # a group of its own: signals reach its children, Ctrl-C does not
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._send(settings)
            self.version = str(self._reply("start")["ready"])
            self.first_token_s = time.perf_counter() - start
            self._stop()
        except BaseException:
            self.kill()
            raise

    def run(
        self,
        requests: AnyRequests,
        between: Callable[[], object] | None = None,
    ) -> float:
        """Serve all requests, each with at least the tokens it asks for; the seconds it took.

        Args:
            requests: What to serve.
            between: Called every `SLICE_S` seconds while the engine is stopped; that time does not count.

        Raises:
            QuireError: it failed, or took longer than it may. It is gone then.
        """
        return float(self.serve(requests, between)["seconds"])

    def serve(
        self,
        requests: AnyRequests,
        between: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """As `run`, but everything that the program says: "seconds", and what else it measures.

        Raises:
            QuireError: it failed, or took longer than it may. It is gone then.
        """
        prompts = [request.prompt for request in requests]
        what = f"a run of {len(requests)} requests"
        pauses: list[tuple[float, float]] = []
        try:
            self._signal(signal.SIGCONT)
            self._send({"prompts": prompts, "output_lens": [request.output_len for request in requests]})
            ends = time.monotonic() + self._timeout_s
            while between is not None and not self._has_output(SLICE_S):
                begin = time.monotonic()
                if begin > ends:
                    raise QuireError(f"{self.name}: {what} took longer than {self._timeout_s:g} s (--timeout)")
                self._stop()
                between()
                pauses.append((begin, time.monotonic()))
                self._signal(signal.SIGCONT)
            reply = self._reply(what)
            self._stop()
        except BaseException:
            self.kill()
            raise
        # One clock for both processes: a pause after the last token is in no time that was taken.
        paused_s = sum(end - begin for begin, end in pauses if begin < reply["ended_s"])
        return {**reply, "seconds": float(reply["seconds"]) - paused_s}

    def _has_output(self, timeout_s: float) -> bool:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def peak_memory_bytes(self) -> int | None:
        """Most memory that the process and its children held at a time each (their high-water marks, added up); None
        where the system does not say. Mapped files count once they were read."""
        marks = [_high_water_bytes(pid) for pid in _process_tree(self._process.pid)]
        known = [mark for mark in marks if mark is not None]
        return sum(known) if known else None

    def close(self) -> None:
        """Let it end; end it when it does not. Idempotent."""
        if self._is_gone:
            return
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End it and its children now. Idempotent."""
        if self._is_gone:
            return
        self._is_gone = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        """Stop it, and see that it has stopped: who is measured next must not share the machine."""
        self._signal(signal.SIGSTOP)
        # WNOWAIT leaves its end, should it come instead, to be seen by whoever asks next.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader while a child of it is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = json.dumps(message).encode() + b"\n"
        deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:  # its reply says why
            selector.register(self._process.stdin, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise QuireError(f"{self.name}: did not read its input for {self._timeout_s:g} s (--timeout)")
                data = data[os.write(self._process.stdin.fileno(), data) :]

    def _reply(self, what: str) -> dict[str, Any]:
        line = self._read_line(what)
        try:
            reply = json.loads(line)
        except ValueError:
            reply = {"error": f"said something unreadable: {line[:200]!r}" if line else "ended without a word"}
        if "error" in reply:
            raise QuireError(f"{self.name}: {what} failed: {reply['error']}{self._last_lines()}")
        return dict(reply)

    def _read_line(self, what: str) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise QuireError(f"{self.name}: {what} took longer than {self._timeout_s:g} s (--timeout)")
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    return self._buffer
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
        return "".join(f"\n    {line}" for line in lines)


def load_peer(
    name: str,
    model: Path,
    requests: Sequence[BenchRequest],
    *,
    dtype: str,
    num_threads: int | None,
    batch_size: int,
    options: PeerOptions | None = None,
    timeout_s: float = 3600.0,
) -> PeerProcess:
    """Start a peer by name, ready for these requests.

    Args:
        name: A key of `PEERS`.
        model: Checkpoint folder.
        requests: What it will be asked; for its context and its KV cache.
        dtype: float32, float16 or bfloat16.
        num_threads: Of the processor; None leaves it to the peer.
        batch_size: Requests it runs at once.
        options: Where peers and their files are.
        timeout_s: Bound on its start and on each run.

    Raises:
        ConfigError: unknown name, the peer is not installed, or a batch size below 1.
        QuireError: it did not start.
    """
    if batch_size < 1:
        raise ConfigError(f"the peer's batch size must be at least 1, got {batch_size}", field="peer_batch_size")
    (engine,), _ = find_peers([name], options or PeerOptions())
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests) + 1
    settings = engine_settings(
        model, dtype=dtype, num_threads=num_threads, max_model_len=longest, max_num_seqs=batch_size
    )
    return PeerProcess(engine, settings, timeout_s=timeout_s)


def engine_settings(
    model: Path, *, dtype: str, num_threads: int | None, max_model_len: int, max_num_seqs: int
) -> dict[str, Any]:
    """What a program of `programs/` is told; its KV cache has room for all sequences at full length."""
    return {
        "model": str(model),
        "dtype": dtype,
        "num_threads": num_threads,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "num_kv_tokens": max_model_len * max_num_seqs,
    }


def start_program(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, safe from interrupts: a handler of SIGINT or SIGTERM that raises while the process is being
    made would leave it to nobody. Here the process ends first, then the handler runs. (Blocking the signals would not
    do: a program inherits what is blocked.) Outside the main thread no handler runs, and nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        return subprocess.Popen(command, **options)
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda one, _: came.append(one)) for number in INTERRUPTS}
    try:
        process = subprocess.Popen(command, **options)
        if came:
            process.kill()
            process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
    return process


def peer_environment(num_threads: int | None, python: str = sys.executable) -> dict[str, str]:
    """This process's environment, for a program of another interpreter, with the threads that OpenMP may use."""
    environment = dict(os.environ)
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # made for this one
    if num_threads:
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = str(num_threads)
    return environment


def _process_tree(pid: int) -> list[int]:
    """The process and all its descendants (Linux)."""
    found, new = [pid], [pid]
    while new:
        children: list[int] = []
        for parent in new:
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children += map(int, task.read_text().split())
        new = [child for child in children if child not in found]
        found += new
    return found


def _high_water_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
