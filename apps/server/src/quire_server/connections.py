"""The connections of one server: how many there may be, and which gives way when there are too many. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

__all__ = ["RESERVED_CONNECTIONS", "Connections", "connection_limit"]

RESERVED_CONNECTIONS = 16
"""Connections beyond the limit, on which health checks are still answered."""

OTHER_FILES = 128
"""Open files of the process besides connections: the engine's sockets, the response store, MCP servers."""


@dataclass(slots=True)
class Connections:
    """Open connections, by transport. Those that wait for a request give way to new ones, the longest waiting first:
    whoever opens many and sends nothing keeps nobody else out."""

    limit: int
    """Connections beyond these are for health checks alone."""
    _open: set[asyncio.Transport] = field(default_factory=set)
    _waiting: dict[asyncio.Transport, None] = field(default_factory=dict)

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection, and drop another one for it if there are too many.

        Returns:
            Whether there is room; if not, the reserve is used up, too.
        """
        self._open.add(transport)
        if self.is_over_limit and self._waiting:
            oldest = next(iter(self._waiting))
            self.closed(oldest)
            oldest.abort()
        self._waiting[transport] = None
        return len(self._open) <= self.limit + RESERVED_CONNECTIONS

    def closed(self, transport: asyncio.Transport) -> None:
        """Count it no longer."""
        self._open.discard(transport)
        self._waiting.pop(transport, None)

    def waits(self, transport: asyncio.Transport) -> None:
        """It has no request that is being answered."""
        if transport in self._open:
            self._waiting[transport] = None

    def works(self, transport: asyncio.Transport) -> None:
        """It has a request, and does not give way."""
        self._waiting.pop(transport, None)

    @property
    def is_over_limit(self) -> bool:
        """Whether the reserve is in use."""
        return len(self._open) > self.limit


def connection_limit(setting: int) -> int:
    """`wanted`, or fewer when the process may not have so many files open. Raises its soft limit as far as is needed
    and allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return setting
    needed = setting + RESERVED_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return setting
    return max(1, soft - RESERVED_CONNECTIONS - OTHER_FILES)
