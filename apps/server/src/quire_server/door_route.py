"""What the routes of a door say of themselves: doors are for clients of other engines (Ollama, llama.cpp, SGLang)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from quire_server.context import ServerContext
from quire_server.openapi import JSON, Bodies, Media, Query

__all__ = ["DoorRoute"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class DoorRoute:
    """One route."""

    method: str
    path: str
    handler: Handler
    answers: Media = field(default_factory=lambda: JSON)
    body: Bodies | None = None
    query: Query = field(default_factory=dict)
    generates: bool = False
    """Whether it needs a model that generates."""
    needs_awake: bool = True
    """Whether it needs the served model to be awake; routes that may be for another one look themselves."""
    is_limited: bool = True
    """Whether a request with a body counts to the limits of the caller's key."""
    is_admin: bool = False
    """Whether it changes the server for everybody."""
    computes: bool = False
    """Whether a model computes for it, for a route that need not generate."""

    @property
    def is_work(self) -> bool:
        """Whether somebody waits for what a model computes: lines of batches make way."""
        return self.computes or (self.generates and self.is_limited)
