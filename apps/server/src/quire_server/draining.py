"""The end of a server that was asked to stop: load balancers first, then clients, then the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from quire_server.context import ServerContext
from quire_server.http_server import ABORT_GRACE_S

if TYPE_CHECKING:
    from quire_server.http_server import HTTPServer

__all__ = ["drain"]

_logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""How often to look whether all is done."""


async def drain(context: ServerContext, http: HTTPServer, running: asyncio.Future[None], *, delay_s: float) -> None:
    """Stop serving in good order. Streams that do not end in time get their protocol's last event.

    Args:
        context: Of the routes, which refuse new requests from some moment on.
        http: The listening server.
        running: Its `serve`.
        delay_s: How long to go on as before, but for `GET /ready`.
    """
    timeout_s = context.llm.config.engine.shutdown_timeout_s
    context.state.is_leaving = True
    num_requests = context.num_requests
    _logger.info("stopping: %d requests are being answered and have %g s to finish", num_requests, timeout_s)
    if delay_s:
        await asyncio.wait((running,), timeout=delay_s)
    context.state.is_draining = True
    http.should_exit = True
    if not await _is_done(context, running, timeout_s):
        num_requests = sum(llm.engine.abort_all() for llm in context.llms)
        _logger.warning("%d requests were not done within --shutdown-timeout-s=%g: ended", num_requests, timeout_s)
        if not await _is_done(context, running, ABORT_GRACE_S):
            http.force_exit = True
    await running


async def _is_done(context: ServerContext, running: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait until all connections are closed and nothing runs in the background; whether that was within the time."""
    deadline_s = time.monotonic() + timeout_s
    while context.num_requests or not running.done():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True
