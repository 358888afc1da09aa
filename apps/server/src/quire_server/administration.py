"""Who may change the server for everybody: pause it, forget its cache, exchange its adapters."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from quire_server.context import ServerContext
from quire_server.errors import HTTPError

__all__ = ["ADMIN_PATHS", "for_admins"]

ADMIN_PATHS = frozenset(
    {
        "/collective_rpc",
        "/continue_generation",
        "/flush_cache",
        "/pause",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/resume",
        "/is_paused",
        "/is_scaling_elastic_ep",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/restart_engines",
        "/scale_elastic_ep",
        "/server_info",
        "/start_profile",
        "/stop_profile",
        "/v1/admin/config",
        "/v1/admin/config/rollback",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Served with --enable-admin-routes, or where some key is an administrator's."""

Handler = Callable[[ServerContext, Request], Awaitable[Response]]


def for_admins(handler: Handler, *, is_own: bool = False) -> Handler:
    """The handler, for administrators alone if some key is theirs; else whoever may send requests may send these.

    Args:
        handler: What it changes is everybody's.
        is_own: Unless an ordinary key changes with it what is its own: then --enable-admin-routes opens it to all.
    """

    @functools.wraps(handler)
    async def checked(context: ServerContext, request: Request) -> Response:
        is_open = not context.api_keys.has_admins or (is_own and context.config.enable_admin_routes)
        if not is_open and not request.state.caller.is_admin:
            raise HTTPError(
                403, f"{request.url.path} wants the key of an administrator (--admin-api-key)", code="not_an_admin"
            )
        return await handler(context, request)

    return checked
