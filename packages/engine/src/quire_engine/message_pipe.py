"""Both directions between two processes over ZMQ, on an event loop: what cannot be sent at once waits in order.

Knows bytes and sockets; knows no messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

__all__ = ["MessagePipe"]

RECEIVE_BATCH = 64
"""Messages taken per turn of the event loop, so that a flood leaves room for everything else."""
RETRY_SEND_S = 0.01


class MessagePipe:
    """One end. To be made and used on a running event loop.

    Args:
        context: Makes the sockets.
        send_to: Address.
        receive_from: Address.
        on_message: Called with each message that comes.
        binds: Whether this end makes the addresses; the other one connects to them.
        max_queued_messages: On the way, in each direction.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        send_to: str,
        receive_from: str,
        on_message: Callable[[bytes], None],
        *,
        binds: bool,
        max_queued_messages: int,
    ) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._sender: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._receiver: zmq.Socket[bytes] = context.socket(zmq.PULL)
        for socket, address in ((self._sender, send_to), (self._receiver, receive_from)):
            socket.set_hwm(max_queued_messages)
            socket.setsockopt(zmq.LINGER, 0)
            if binds:
                socket.bind(address)
            else:
                socket.connect(address)
        self._unsent: deque[bytes] = deque()
        self._is_closed = False
        self._fd = int(self._receiver.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        self._loop.call_soon(self._on_readable)

    @property
    def num_unsent(self) -> int:
        """Number of messages that wait for room on the way."""
        return len(self._unsent)

    def send(self, data: bytes) -> None:
        """Send, now or as soon as there is room; nothing after `close`."""
        if self._is_closed or (not self._unsent and self._try_send(data)):
            return
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self._loop.call_later(RETRY_SEND_S, self._send_waiting)

    def _try_send(self, data: bytes) -> bool:
        try:
            self._sender.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_waiting(self) -> None:
        while self._unsent and not self._is_closed:
            if not self._try_send(self._unsent[0]):
                self._loop.call_later(RETRY_SEND_S, self._send_waiting)
                return
            self._unsent.popleft()

    def _on_readable(self) -> None:
        # The descriptor is edge-triggered: read until there is nothing left, or come back.
        for _ in range(RECEIVE_BATCH):
            if self._is_closed:
                return
            try:
                data = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(data)
        self._loop.call_soon(self._on_readable)

    def close(self) -> None:
        """Send and receive no more; what waits is dropped. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._unsent.clear()
            self._loop.remove_reader(self._fd)
            self._sender.close(linger=0)
            self._receiver.close(linger=0)
