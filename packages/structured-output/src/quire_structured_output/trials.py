"""`TrialProcess`: constraints of strangers are compiled elsewhere first, in a process that may starve or die of them.

What comes back is the translated grammar and the way of the trial walk through it, so that the engine's process neither
parses nor walks what has not been found harmless. Knows sockets; what is tried is `trial_process`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

from quire_interfaces import CompiledGrammar, GrammarSpec, RequestError
from quire_structured_output.allowance import Allowance
from quire_structured_output.vocabulary import Vocabulary, write_vocabulary

__all__ = ["SupportsTrials", "TrialProcess", "TriedGrammar", "can_fork"]

BLAME_TIMEOUT_S = 1.0
PATIENCE = 40
"""A trial that has of its allowance may take so many times its processor time by the clock: others compute, too."""
START_S = 60.0
"""How long the process may take to start."""


class TriedGrammar(NamedTuple):
    """A constraint that compiled, and whose steps are quick."""

    source: str
    """In the library's own notation."""
    walk: tuple[int, ...]
    """Tokens that may come from the beginning on, as the trial went."""
    compile_s: float
    """Processor time that compiling `source` takes."""


@runtime_checkable
class SupportsTrials(Protocol):
    """A `GrammarBackend` whose constraints can be tried in another process."""

    vocabulary: Vocabulary

    def compile_tried(self, spec: GrammarSpec, tried: TriedGrammar, *, starve: bool = False) -> CompiledGrammar:
        """As `compile`, of what was tried; with `starve` only on what processor time nobody else wants."""


def can_fork() -> bool:
    """Whether this system has what trials need."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


class TrialProcess:
    """Starts with the first trial, and again if it died. Thread-safe.

    Args:
        vocabulary: The model's tokens.
        allowance: Processor time that trials may take from others.
    """

    def __init__(self, vocabulary: Vocabulary, allowance: Allowance | None = None) -> None:
        self._vocabulary = vocabulary
        self._allowance = allowance or Allowance()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_closed = False

    def run(
        self, spec: GrammarSpec, timeout_s: float, *, most_s: float | None = None, may_disturb: bool = True
    ) -> TriedGrammar:
        """Try a constraint; waits for it.

        Args:
            timeout_s: Processor time that it gets, as long as it has of the allowance; by the clock otherwise.
            most_s: How long it may take at most, by the clock; None for as long as that.
            may_disturb: Whether it may have of the allowance; else it runs when nothing else wants to.

        Raises:
            RequestError: it cannot be used.
            TimeoutError: that was not known in time.
        """
        most_s = min(most_s or timeout_s, PATIENCE * timeout_s)
        answer, text = self._ask("try", spec, timeout_s, most_s, may_disturb=may_disturb)
        if "error" in answer:
            raise RequestError(answer["error"], param=answer["param"], code=answer["code"])
        return TriedGrammar(text, tuple(answer["walk"]), answer["compile_s"])

    def largest_part(self, spec: GrammarSpec) -> str:
        """`blame.largest_part`, or the size alone if even that takes long."""
        with contextlib.suppress(TimeoutError, RequestError):
            return self._ask("blame", spec, BLAME_TIMEOUT_S, BLAME_TIMEOUT_S, may_disturb=False)[1]
        return f"the whole of it, {len(spec.text)} characters"

    def close(self) -> None:
        """End the process, for good; trials under way end with their deadline. Idempotent."""
        with self._lock:
            self._is_closed = True
            channel, process = self._channel, self._process
            self._channel = self._process = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.wait(10)

    def _ask(
        self, action: str, spec: GrammarSpec, timeout_s: float, most_s: float, *, may_disturb: bool = True
    ) -> tuple[dict[str, Any], str]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._order(theirs)
            quick_s, start_s, used_s = self._allowance.take() if may_disturb else 0.0, time.monotonic(), None
            try:
                limits = {"timeout_s": timeout_s, "most_s": most_s, "quick_s": quick_s}
                answer, text = self._exchange(ours, action, spec, limits)
                used_s = answer["used_s"]
                return answer, text
            finally:  # of what did not answer, no more is known than how long it was there
                self._allowance.give_back(quick_s - (time.monotonic() - start_s if used_s is None else used_s))

    def _exchange(
        self, ours: socket.socket, action: str, spec: GrammarSpec, limits: dict[str, float]
    ) -> tuple[dict[str, Any], str]:
        start_s = time.monotonic()
        ours.settimeout(limits["most_s"])
        options = [spec.whitespace_pattern, spec.additional_properties]
        head = {"action": action, "kind": spec.kind, "options": options, **limits}
        try:
            ours.sendall(json.dumps(head).encode() + b"\n" + spec.text.encode("utf-8", "surrogatepass"))
            ours.shutdown(socket.SHUT_WR)
            answer = self._answer(ours, start_s + limits["most_s"])
        except ConnectionError:
            answer = b""
        if not answer:
            if time.monotonic() - start_s >= limits["timeout_s"] - 0.05:  # its own alarm was a little earlier
                raise TimeoutError
            raise RequestError(
                f"structured_outputs.{spec.kind} cannot be used: compiling it needed too much memory or too deep a "
                f"recursion; make it smaller ({len(spec.text)} characters)",
                param=f"structured_outputs.{spec.kind}",
                code="grammar_too_large",
            )
        head_line, _, text = answer.partition(b"\n")
        return json.loads(head_line), text.decode("utf-8", "surrogatepass")

    def _answer(self, ours: socket.socket, deadline_s: float) -> bytes:
        """All of it; empty when the child died."""
        parts: list[bytes] = []
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            ours.settimeout(left_s)
            part = ours.recv(1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)

    def _order(self, theirs: socket.socket) -> None:
        """Have a child serve the other end; the process is started when it is not there."""
        with self._lock:
            if self._is_closed:
                raise RequestError("structured_outputs cannot be compiled any more: the engine is closed")
            for _ in range(2):
                try:
                    channel = self._channel = self._channel or self._start()
                    socket.send_fds(channel, [b"t"], [theirs.fileno()])
                    return
                except OSError:
                    if self._channel is not None:
                        self._channel.close()
                    self._channel = None
        raise RequestError("structured_outputs cannot be compiled: the process for that does not start")

    def _start(self) -> socket.socket:
        """Start the process, and wait until it is ready. Raises OSError where it is not."""
        if self._process is not None:
            self._process.wait(10)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "quire_structured_output.trial_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            write_vocabulary(ours, self._vocabulary)
            ours.settimeout(START_S)
            if not ours.recv(1):
                raise ConnectionResetError("the process ended")
        except OSError:
            ours.close()
            raise
        return ours
