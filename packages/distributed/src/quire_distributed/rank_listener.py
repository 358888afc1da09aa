"""Rank 0's side of ranks on other hosts: hosts and ranks connect to it, and it tells hosts which ranks to run.

A host (`node.serve_node`) keeps one connection open, over which it says how a rank's process ended; each rank has one
of its own, for steps. Knows connections and ranks; knows no network, and loads no torch.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from quire_distributed.rank_handle import RankEnd, RankHandle, end_of_process
from quire_distributed.signed_channel import SignedChannel, accept_channel
from quire_distributed.worker import RankSpec
from quire_interfaces import ConfigError, RankDeadError

__all__ = ["Node", "RankListener", "RemoteRank"]

_logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.5
"""After a rank's connection has ended, how long its host may take to say why."""
_CLOSE_S = 5.0
"""How long a rank may take to give its memory back before its connection is closed."""


class Node:
    """A host that runs ranks. Made by `RankListener`.

    Args:
        number: Of the host.
        channel: To it.
        hello: What it said of itself.
    """

    def __init__(self, number: int, channel: SignedChannel, hello: dict[str, Any]) -> None:
        self.number, self.hello = number, hello
        self._channel = channel
        self._changed = threading.Condition()
        self._returncodes: dict[int, int] = {}
        self._is_gone = False
        threading.Thread(target=self._watch, name=f"quire-node-{number}", daemon=True).start()

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Have ranks run there.

        Raises:
            RankDeadError: The host is gone.
        """
        try:
            self._channel.send(("start", list(specs)))
        except OSError:
            raise RankDeadError(specs[0].rank, f"its host, node {self.number}, is gone") from None

    def refuse(self, cause: str) -> None:
        """Say why it cannot take part, and let it go."""
        with contextlib.suppress(OSError):
            self._channel.send(("refused", cause))
        self._channel.close()

    def cause_of_end(self, rank: int) -> RankEnd:
        """Why the connection of a rank of this host has ended."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._returncodes or self._is_gone, _LAST_WORDS_S)
            if rank in self._returncodes:
                return end_of_process(self._returncodes[rank])
            return RankEnd(f"its host, node {self.number}, is gone" if self._is_gone else "the connection to it broke")

    def cause_of_absence(self, rank: int) -> RankEnd | None:
        """Why a rank that has not connected will not; None where it may."""
        with self._changed:
            if rank in self._returncodes:
                return end_of_process(self._returncodes[rank])
            return RankEnd(f"its host, node {self.number}, is gone") if self._is_gone else None

    def close(self) -> None:
        """End all ranks that still run there."""
        self._channel.close()

    def _watch(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                match self._channel.receive():
                    case ("ended", int(rank), int(returncode)):
                        with self._changed:
                            self._returncodes[rank] = returncode
                            self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()


class RemoteRank(RankHandle):
    """A rank that has connected to this host.

    Args:
        rank: Its number.
        channel: To it.
        cause_of_end: Says why its connection has ended.
        release: Called when it was closed.
    """

    def __init__(
        self, rank: int, channel: SignedChannel, cause_of_end: Callable[[], RankEnd], release: Callable[[], None]
    ) -> None:
        super().__init__(rank, channel)
        self._explain, self._release = cause_of_end, release
        self._watcher.start()

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._channel.send(("close",))
        self._watcher.join(_CLOSE_S)
        self._channel.close()
        self._release()
        self._watcher.join()

    def _cause_of_end(self) -> RankEnd:
        return self._explain()


class RankListener:
    """Where hosts and ranks connect to rank 0; a context manager. What has connected stays so when it is closed.

    Args:
        host: Address of this host, as the others reach it.
        port: A free port of it; 0 for any.
        secret: What all hosts know; empty on trusted networks.
        silence_s: How long a host may not answer before it counts as gone.

    Raises:
        ConfigError: It cannot listen there.
    """

    def __init__(self, host: str, port: int, secret: bytes, *, silence_s: float) -> None:
        self._secret, self._silence_s = secret, silence_s
        self._changed = threading.Condition()
        self._nodes: dict[int, Node] = {}
        self._ranks: dict[int, SignedChannel] = {}
        self._listening = _listen(host, port)
        self.port: int = self._listening.getsockname()[1]
        """The port that it listens on."""
        threading.Thread(target=self._accept, name="quire-rank-listener", daemon=True).start()

    def __enter__(self) -> RankListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def wait_for_nodes(
        self, numbers: Collection[int], timeout_s: float, on_wait: Callable[[list[int]], None] = lambda missing: None
    ) -> dict[int, Node]:
        """The hosts of these numbers, once they have all connected.

        Args:
            numbers: Of the hosts.
            timeout_s: How long to wait.
            on_wait: Called with the numbers of those that are missing, whenever one has come, and at first.

        Raises:
            ConfigError: They did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while missing := [number for number in numbers if number not in self._nodes]:
                on_wait(missing)
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise ConfigError(
                        f"node {', '.join(map(str, missing))} did not come to port {self.port} within {timeout_s:g} s: "
                        "start the same command there with --headless, its --node-rank and the same --master-addr",
                        field="nnodes",
                    )
            return {number: self._nodes[number] for number in numbers}

    def wait_for_ranks(
        self, causes: Mapping[int, Callable[[], RankEnd | None]], timeout_s: float
    ) -> dict[int, SignedChannel]:
        """The connections of ranks, once they have all connected.

        Args:
            causes: By number of the rank what says why it will not come; None where it may.
            timeout_s: How long to wait.

        Raises:
            RankDeadError: One ended before, or did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while missing := [rank for rank in causes if rank not in self._ranks]:
                for rank in missing:
                    if (cause := causes[rank]()) is not None:
                        raise RankDeadError(rank, *cause)
                if time.monotonic() > deadline_s:
                    raise RankDeadError(missing[0], f"it did not connect within {timeout_s:g} s")
                self._changed.wait(0.2)
            return {rank: self._ranks.pop(rank) for rank in causes}

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._welcome, args=(end, address), daemon=True).start()

    def _welcome(self, end: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            channel, purpose = accept_channel(end, self._secret, silence_s=self._silence_s)
        except (OSError, ConfigError) as error:
            _logger.warning("a connection from %s was refused: %s", address[0], error)
            return
        with self._changed:
            match purpose:
                case {"node": int(number), "hello": dict(hello)}:
                    if (former := self._nodes.pop(number, None)) is not None:  # it was started again meanwhile
                        former.close()
                    self._nodes[number] = Node(number, channel, hello)
                case {"rank": int(rank)}:
                    self._ranks[rank] = channel
                case _:
                    channel.close()
            self._changed.notify_all()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(
            f"ranks of other hosts cannot be heard at {host}:{port}: {error.strerror or error}; master_addr must be an "
            "address of the host of node_rank 0, and master_port free there",
            field="master_addr",
        ) from None
