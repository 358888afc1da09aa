"""Whether the other ranks still live, told by datagrams: for ranks that share no memory. Knows addresses, not tensors.

Every rank sends every other one a datagram each `BEAT_S`, through a socket of their own. One whose host is up and whose
process has ended refuses it; one that is cut off falls silent. A datagram says who is gone as far as its sender knows,
so that all ranks name the same one.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from quire_interfaces import RankDeadError

__all__ = ["BEAT_S", "Liveness", "bind_datagrams"]

BEAT_S = 0.2
"""Seconds from one datagram to the next."""
LEFT = "it left the group"
_LEAVING_GRACE_S = 0.5
"""Seconds in which the others complete what a rank that left had taken part in."""


def bind_datagrams(host: str) -> socket.socket:
    """A socket for datagrams at a free port of one of this host's addresses.

    Raises:
        OSError: `host` is no address of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_DGRAM)
    bound.bind((host, 0))
    return bound


class Liveness:
    """A thread that watches the other ranks of a group.

    Args:
        rank: Number of this rank.
        sockets: By each other rank's number a socket that is bound here; `start` connects it.
        token: What tells this group's datagrams from any others.
        silence_s: How long nothing may be heard of a rank before it counts as gone.
        on_failure: Called once, by the thread, when a rank is gone and whoever waits for it is to be woken.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        token: str,
        silence_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._token = token
        self._silence_s = silence_s
        self._on_failure = on_failure
        self._failure: tuple[int, str] | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"liveness of rank {rank}")

    def start(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Begin to watch; `addresses` are those of the other ranks' sockets for this one."""
        for peer, address in addresses.items():
            self._sockets[peer].connect(address)
        self._thread.start()

    def check(self) -> None:
        """Raise if a rank is known to be gone.

        Raises:
            RankDeadError: A rank is gone.
        """
        if self._failure is not None:
            raise RankDeadError(*self._failure)

    def failure_of(self, peer: int, cause: str) -> RankDeadError:
        """Why what this rank did with `peer` failed: who is gone, as far as any rank knows, else `peer` by `cause`."""
        if not self._known.wait(3 * BEAT_S):
            self.report(peer, cause)
        assert self._failure is not None
        return RankDeadError(*self._failure)

    def report(self, rank: int, cause: str) -> None:
        """Say that a rank is gone, to this and to all others. Only the first report counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = (rank, cause)
        self._send()
        self._known.set()

    def close(self) -> None:
        """Leave the group."""
        self.report(self._rank, LEFT)
        self._closed = True

    def _run(self) -> None:
        heard = dict.fromkeys(self._sockets, time.monotonic())
        # No daemon, which Python would end inside torch's frames: it ends itself when the program does.
        while self._failure is None and threading.main_thread().is_alive():
            self._send()
            self._listen(heard)
            for peer, last in heard.items():
                if time.monotonic() - last > self._silence_s:
                    self.report(peer, f"nothing was heard of it for {self._silence_s:g} s")
        if self._failure is not None:
            self._on_failure()
        while not self._closed and threading.main_thread().is_alive():  # whoever has not heard of it yet
            self._send()
            time.sleep(BEAT_S)
        for each in self._sockets.values():
            each.close()

    def _send(self) -> None:
        message = json.dumps([self._token, self._failure]).encode()
        for peer, to in self._sockets.items():
            try:
                to.send(message)
            except ConnectionRefusedError:
                self._refused(peer)
            except OSError:  # no way there at present: if it stays so, the peer falls silent
                pass

    def _listen(self, heard: dict[int, float]) -> None:
        """Receive for `BEAT_S`, or until a rank is gone."""
        peers = {each.fileno(): (peer, each) for peer, each in self._sockets.items()}
        waiting = select.poll()  # select() takes no descriptor above 1,023
        for fd in peers:
            waiting.register(fd, select.POLLIN)
        end = time.monotonic() + BEAT_S
        while self._failure is None and (left_s := end - time.monotonic()) > 0:
            for fd, _ in waiting.poll(left_s * 1000):
                peer, each = peers[fd]
                try:
                    message = json.loads(each.recv(4096))
                except ConnectionRefusedError:
                    self._refused(peer)
                except (OSError, ValueError):
                    continue
                else:
                    if isinstance(message, list) and message[:1] == [self._token]:
                        heard[peer] = time.monotonic()
                        self._hear(message[1])

    def _hear(self, failure: list[object] | None) -> None:
        match failure:
            case [int(rank), str(cause)]:
                if cause == LEFT:
                    time.sleep(_LEAVING_GRACE_S)
                self.report(rank, cause)

    def _refused(self, peer: int) -> None:
        """A peer's process ended: because of another rank, where one of the datagrams that wait here says so."""
        if self._failure is None:
            self.report(*(self._reported_failure() or (peer, "its process ended")))

    def _reported_failure(self) -> tuple[int, str] | None:
        """Who is gone by the datagrams that have come and were not read; None where none says so."""
        for each in self._sockets.values():
            while True:
                try:
                    message = json.loads(each.recv(4096, socket.MSG_DONTWAIT))
                except ConnectionRefusedError:
                    continue
                except (OSError, ValueError):
                    break
                match message:
                    case [self._token, [int(rank), str(cause)]] if cause != LEFT:
                        return rank, cause
        return None
