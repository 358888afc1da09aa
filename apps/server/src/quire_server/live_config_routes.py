"""GET and PATCH /v1/admin/config, POST /v1/admin/config/rollback: settings that change while the server runs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.generation_config import generation_defaults
from quire_engine import HubClient
from quire_server.body import read_model
from quire_server.context import ServerContext
from quire_server.door_route import DoorRoute
from quire_server.live_settings import (
    DEFAULTS,
    IN_FLIGHT,
    KEY_LIMITS,
    NOTICE,
    LiveSettings,
    engine_values,
    key_limits_of,
    taken,
    with_server_values,
)

__all__ = ["LIVE_CONFIG_ROUTES", "join_live_settings"]


class ConfigChanges(BaseModel):
    """Body of PATCH /v1/admin/config."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    """Name -> new value; null for that of the start."""
    dry_run: bool = False
    """Check them, and change nothing."""


async def show_config(context: ServerContext, request: Request) -> Response:
    """The settings that may change while the server runs: what they are, what they were at the start, and who has
    changed them."""
    client = context.llm.client
    if isinstance(client, HubClient):
        return JSONResponse(await client.call("show_config"))
    return JSONResponse(_own(context).shown())


async def patch_config(context: ServerContext, request: Request) -> Response:
    """Change some of them, all that are named or none."""
    body = await read_model(context, request, ConfigChanges)
    who, client = _who(context, request), context.llm.client
    if isinstance(client, HubClient):
        shown = await client.call("patch_config", changes=body.settings, changed_by=who, dry_run=body.dry_run)
    else:
        shown = await _own(context).patch(body.settings, who, dry_run=body.dry_run)
    return JSONResponse(shown)


async def roll_back_config(context: ServerContext, request: Request) -> Response:
    """Undo the last change that was not undone."""
    who, client = _who(context, request), context.llm.client
    if isinstance(client, HubClient):
        return JSONResponse(await client.call("roll_back_config", changed_by=who))
    return JSONResponse(await _own(context).roll_back(who))


def join_live_settings(context: ServerContext) -> None:
    """Make the settings of a server changeable: here, where this process has the engines, else as its hub says."""
    server, config = context.config, context.llm.config
    key_limits = {caller.tenant: caller.limits for caller in context.api_keys.callers}

    def put_into_effect(values: Mapping[str, Any]) -> None:
        changed = with_server_values(server, values)
        model = dataclasses.replace(config.model, **taken(values, (DEFAULTS,)))
        defaults = generation_defaults(model, context.llm.folder)
        context.config, context.llm.generation_defaults = changed, defaults
        if changed.log_level != server.log_level or context.state.has_changed_level:
            context.state.has_changed_level = True
            logging.getLogger().setLevel(changed.log_level.upper())
        limits = key_limits_of(values.get(KEY_LIMITS, {}), key_limits)
        context.api_keys.set_limits(limits)
        context.rate_limiter.set_limits(limits)
        if isinstance(context.llm.client, HubClient):
            context.llm.client.bound_requests(values.get(IN_FLIGHT))

    context.state.on_notices[NOTICE] = put_into_effect

    async def apply(values: Mapping[str, Any]) -> None:
        before = engine_values(live.values)
        if engine_values(values) != before:
            await context.llm.client.reconfigure(engine_values(values))
        try:
            put_into_effect(values)
        except BaseException:
            await context.llm.client.reconfigure(before)
            raise

    live = context.state.live_settings = LiveSettings(config, server, key_limits, apply)


def _own(context: ServerContext) -> LiveSettings:
    assert context.state.live_settings is not None
    return context.state.live_settings


def _who(context: ServerContext, request: Request) -> str:
    """Who asks, for the log."""
    return f"{context.caller.tenant or 'somebody without a key'} (request {request.state.request_id})"


LIVE_CONFIG_ROUTES: tuple[DoorRoute, ...] = (
    DoorRoute("GET", "/v1/admin/config", show_config, is_admin=True),
    DoorRoute("PATCH", "/v1/admin/config", patch_config, body=ConfigChanges, needs_awake=False, is_admin=True),
    DoorRoute("POST", "/v1/admin/config/rollback", roll_back_config, is_admin=True),
)
