"""A host without a server: it runs ranks of an engine whose rank 0 is on another host, and rejoins when that restarts.

Knows processes and connections; loads no torch (the ranks do).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from quire_distributed.signed_channel import SignedChannel, WrongSecretError, connect_channel
from quire_distributed.worker import RankSpec, die_with, run_rank
from quire_interfaces import ConfigError

__all__ = ["rank_main", "serve_node"]

_logger = logging.getLogger(__name__)

_RETRY_S = 0.5
"""How long until the next try to reach rank 0's host."""


def serve_node(
    address: tuple[str, int],
    number: int,
    hello: dict[str, Any],
    *,
    secret: bytes,
    silence_s: float,
    localize: Callable[[RankSpec], RankSpec],
    is_stopping: threading.Event,
) -> None:
    """Run ranks whenever an engine asks for them, until `is_stopping` is set.

    Args:
        address: Host and port of `RankListener`.
        number: Of this host.
        hello: What the engine is told of this host, as JSON has it.
        secret: What all hosts know; empty on trusted networks.
        silence_s: How long rank 0's host may not answer before it counts as gone.
        localize: Gives a rank what this host has in another place.
        is_stopping: Set to end.

    Raises:
        ConfigError: The engine refused this host, or knows another secret.
    """
    purpose = {"node": number, "hello": hello}
    is_told = False
    while not is_stopping.is_set():
        try:
            control = connect_channel(address, purpose, secret, silence_s=silence_s)
        except OSError as error:
            if not is_told:
                _logger.info("node %d waits for an engine at %s:%d (%s)", number, *address, error)
                is_told = True
            is_stopping.wait(_RETRY_S)
            continue
        is_told = False
        _logger.info("node %d has joined the engine at %s:%d", number, *address)
        _Session(control, address, secret, silence_s, localize, is_stopping).run()


class _Session:
    """The ranks that one engine process has on this host."""

    def __init__(
        self,
        control: SignedChannel,
        address: tuple[str, int],
        secret: bytes,
        silence_s: float,
        localize: Callable[[RankSpec], RankSpec],
        is_stopping: threading.Event,
    ) -> None:
        self._control, self._address = control, address
        self._secret, self._silence_s = secret, silence_s
        self._localize = localize
        self._is_stopping = is_stopping
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until the engine is gone. Raises ConfigError where it refuses this host."""
        threading.Thread(target=self._end_when_stopping, name="quire-node-end", daemon=True).start()
        try:
            while True:
                match self._control.receive():
                    case ("start", list(specs)):
                        for spec in specs:
                            self._start(spec)
                    case ("refused", str(cause)):
                        raise ConfigError(cause)
        except EOFError:
            _logger.info("the engine at %s:%d is gone: its ranks here end", *self._address)
        finally:
            self._is_over.set()
            self._control.close()
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait()

    def _end_when_stopping(self) -> None:
        while not self._is_over.wait(0.1):
            if self._is_stopping.is_set():
                self._control.close()
                return

    def _start(self, spec: RankSpec) -> None:
        try:
            channel = connect_channel(self._address, {"rank": spec.rank}, self._secret, silence_s=self._silence_s)
        except (OSError, WrongSecretError) as error:
            _logger.error("rank %d cannot reach the engine: %s", spec.rank, error)
            self._control.close()
            return
        code = f"import sys; from quire_distributed.node import rank_main; sys.exit(rank_main({os.getpid()}))"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(channel.fileno(),))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which is told below
            process.stdin.write(pickle.dumps((channel.fileno(), channel.keys, self._localize(spec))))
            process.stdin.close()
        channel.let_go()
        self._processes.append(process)
        threading.Thread(target=self._tell_end, args=(spec.rank, process), daemon=True).start()

    def _tell_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        returncode = process.wait()
        with self._lock, contextlib.suppress(OSError):
            self._control.send(("ended", rank, returncode))


def rank_main(parent_pid: int) -> int:
    """A rank's process on a host without rank 0: what it is comes over standard input. The exit status."""
    if not die_with(parent_pid):
        return 1
    channel_fd, keys, spec = pickle.loads(sys.stdin.buffer.read())
    return run_rank(spec, SignedChannel(socket.socket(fileno=channel_fd), keys))
