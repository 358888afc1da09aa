"""One websocket connection: uvicorn's protocol with bounds on what a client may send and leave unread. Knows no route.

The size of messages is bounded by `ws_max_size`, compressed ones by what they inflate to.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from quire_server.connections import Connections

__all__ = ["WebSocketProtocol"]

MAX_FRAGMENTS = 1 << 14
"""Frames of one message: they may be empty, so that its size bounds them not at all."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, bounded."""

    def __init__(self, connections: Connections, send_timeout_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections, self._send_timeout_s = connections, send_timeout_s
        self._send_timer: asyncio.TimerHandle | None = None

    def shutdown(self) -> None:
        """The server drains. Whoever answers over this connection closes it once the answer is told."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self.transport)
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._send_timer is not None and not self.transport.is_closing():
            self.transport.pause_reading()  # pings are answered: whoever sends them must read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if not self.read_paused:
            self.transport.resume_reading()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def handle_parser_exception(self) -> None:
        """As uvicorn's, but what the client still sends is read for a while, and thrown away: on a connection that is
        closed with unread data it may never see why."""
        close = self.conn.close_sent
        if self.close_sent or close is None:
            return
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS and not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} frames")
            self.handle_parser_exception()
            return
        super().handle_cont(event)
