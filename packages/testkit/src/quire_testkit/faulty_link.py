"""A TCP link that does what networks do on bad days: it is slow, cuts, damages, swallows, in a reproducible order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from quire_testkit.faulty_tier import Faults

__all__ = ["FaultyLink"]

CHUNK_BYTES = 4096


class FaultyLink:
    """A port on the loopback address that passes on what it gets to another address, with faults; connections are
    threads. `Faults.loss` is the share of chunks at which both sides are cut off, `corruption` that of chunks with one
    wrong bit, `delay_s` what each chunk takes longer; while `is_dead`, bytes are swallowed.

    Args:
        target: (host, port) of the other end; may be changed for connections to come.
        faults: What goes wrong.
    """

    def __init__(self, target: tuple[str, int], faults: Faults) -> None:
        self.target = target
        self.faults = faults
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: set[socket.socket] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="faulty-link", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), name="faulty-link", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        faults = self.faults
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(CHUNK_BYTES)):
                time.sleep(faults.delay_s)
                if faults.is_dead:
                    continue
                if faults.rng.random() < faults.loss:
                    faults.num_lost += 1
                    break
                if faults.rng.random() < faults.corruption:
                    faults.num_corrupted += 1
                    chunk[faults.rng.randrange(len(chunk))] ^= 1 << faults.rng.randrange(8)
                sink.sendall(chunk)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            self._open.discard(sock)

    def close(self) -> None:
        """Cut everything off. Idempotent."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
